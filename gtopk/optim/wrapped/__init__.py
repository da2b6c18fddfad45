"""The wrapped optimizer: the user's own, in a class derived from the user's.

wrapping.py         one state and one list of groups for both; properties for scripts and modes
adam_step.py        AdamW's steps, where its moments are applied before the exchange; `gtopk.ramp`
local_residual.py   forward passes that include a rank's unsent steps
tree.py             its tensors, taken out on one rank and put in on another
checkpoint.py       its residual in a checkpoint
"""
