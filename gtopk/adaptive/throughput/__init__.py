"""Speeds: what a batch takes on each rank, and the sizes that follow.

timing.py       what a rank computes on a batch
speed.py        seconds = a + c b
policies.py     from what all batches took to the sizes of the next ones
goodput.py      the global batch that makes most progress a second
controller.py   when sizes change, and by how much
"""
