"""The wrapped optimizer: the user's own, of a class derived from its.

wrapping.py     one state and one list of groups for both
tree.py         its tensors, taken out on one rank and put in on another
checkpoint.py   what goes into a checkpoint besides its state
readings.py     what scripts read of it
"""
