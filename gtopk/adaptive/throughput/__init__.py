"""Throughput: the seconds of a batch on each rank, and the batch sizes that follow.

policies.py     a rank's seconds for a batch of b, as a + c b; the next sizes from them
controller.py   when sizes change, and by how much
"""
