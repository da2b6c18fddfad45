"""Lanes: buckets of one optimizer, each with its exchange and what it holds back.

lanes.py              a bucket, its exchange, and what its gradients were
sparse_gradients.py   the lane of gradients that are sparse tensors
held.py               what is held back of a parameter, from one plan of lanes to the next
held_names.py         the same by name, as checkpoints keep it
"""
