"""Buckets: the gradients of many parameters as one vector.

arrays.py       tensors as flat arrays and back
buckets.py      the bucket itself
placeholders.py zeros in place of gradients before the first backward pass
parameters.py   names of parameters, the same on every rank
timestamp.py    a point in time, on the host or in a GPU's stream
"""
