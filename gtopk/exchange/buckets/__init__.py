"""Buckets: what is one vector to the wire is many tensors to the model.

arrays.py       tensors as flat arrays and back
buckets.py      many parameters' gradients as one vector
placeholders.py zeros in place of gradients before the first backward pass
parameters.py   what parameters are called, the same on every rank
"""
