"""`gtopk bench`: measurements of this machine and its network, a sub-command each.

harness.py     what they share: their parser, their ranks, spreads, and networks to take steps of
optimizer.py   a distributed step beside a plain one
collectives/   every reduction beside the library's and the model
"""
