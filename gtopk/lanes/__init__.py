"""Buckets of one optimizer, each with its exchange and its residual.

bucket_exchange.py    a bucket, its exchange, and what its gradients were
sparse_gradients.py   the bucket of gradients that are sparse tensors
residual_state.py     the residual of a parameter, from one plan of buckets to the next
residual_names.py     the same by name, as checkpoints keep it
"""
