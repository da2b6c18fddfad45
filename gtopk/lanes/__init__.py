"""Lanes: buckets of one optimizer, each with its exchange and its residual.

lanes.py              a bucket, its exchange, and what its gradients were
sparse_gradients.py   the lane of gradients that are sparse tensors
residual_state.py     the residual of a parameter, from one plan of lanes to the next
residual_names.py     the same by name, as checkpoints keep it
"""
