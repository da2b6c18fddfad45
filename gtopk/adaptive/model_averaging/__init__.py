"""Mode "adaptive-sgd": every rank trains a replica, and replicas are merged.

loader.py          the loader, and the merge between mega-batches
options.py         options, strategies (Adaptive SGD and its rivals), batch scaling
mega_batches.py    the stretches between merges, and the batches that a rank takes of one
weights.py         the weight of each replica, and the ranks' reports that weights are computed from
"""
