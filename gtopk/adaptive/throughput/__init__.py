"""Throughput: the seconds of a batch on each rank, and the batch sizes that follow.

speed.py        a rank's seconds for a batch of b, measured, and modelled as a + c b
policies.py     the next sizes from the last seconds; the global batch of most progress a second
controller.py   when sizes change, and by how much
"""
