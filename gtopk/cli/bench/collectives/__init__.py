"""`gtopk bench collectives`: every algorithm beside the baselines and the model, on this network.

A case is a number of ranks, a length, a density and a distribution of the picks. In each of its
rounds every contender runs once, after a barrier; its time is that of the slowest rank.
"""
