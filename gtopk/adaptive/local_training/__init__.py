"""Parts of the modes whose ranks step by themselves between exchanges.

local_steps.py      a mode's own step in place of the distributed optimizer's, and its step reports
replica.py          a rank's own model, the center, and their merge; sums of gradients
"""
