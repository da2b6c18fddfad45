"""Buckets: the gradients of many parameters as one vector.

arrays.py       tensors as flat arrays and back; points in a GPU's time
buckets.py      the bucket itself
parameters.py   names of parameters, the same on every rank; zeros in place of gradients before the
                first backward pass
"""
