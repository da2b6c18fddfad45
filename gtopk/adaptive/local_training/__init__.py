"""Ranks that step apart: what is their own between exchanges, and what is all ranks' then.

stepping.py         a mode's own step in place of the distributed optimizer's
spent.py            where a rank's time goes; own_steps.py: and what its steps cost
round_exchange.py   a round's sums of gradients, with a residual
replica.py          a rank's own model, the center of all, and the merge of both
"""
