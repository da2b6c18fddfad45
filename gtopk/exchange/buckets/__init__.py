"""Buckets: the gradients of many parameters as one vector.

arrays.py       tensors as flat arrays and back; streams and timestamps of a GPU
buckets.py      the bucket itself
parameters.py   parameter names, equal on every rank
"""
