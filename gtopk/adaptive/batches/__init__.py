"""Batches: reading them, and the batch that the next step is of.

sources.py       batches from a data set or a stream, cut as the plan says, the same on all ranks
current_batch.py the batch of the next step: its weight, and its factor of the learning rates
"""
