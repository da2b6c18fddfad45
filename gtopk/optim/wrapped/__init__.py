"""The wrapped optimizer: an instance of a class derived from the user's optimizer class.

wrapping.py         shares groups and state with the user's; properties for scripts and modes
adam_step.py        applies AdamW steps with moments from before the exchange; `gtopk.ramp`
local_residual.py   forward passes that include a rank's unsent steps
tree.py             separates an optimizer's tensors on one rank, and inserts them on another
checkpoint.py       its residual in a checkpoint
"""
