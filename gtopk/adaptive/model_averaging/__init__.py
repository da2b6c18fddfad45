"""Mode "adaptive-sgd": every rank trains a replica of its own, and replicas are merged.

loader.py          the loader, and the merge between mega-batches
options.py         options, strategies (Adaptive SGD and its rivals), batch scaling
mega_batches.py    the stretches between merges, and the batches that a rank takes of one
weights.py         how much each replica counts, and the report that it is computed from
"""
