"""Mode "adaptive-sgd": every rank trains a replica, and replicas are merged.

loader.py          the loader, and the merge between mega-batches
options.py         options, strategies (Adaptive SGD and its rivals), batch scaling, and
                   mega-batches: the stretches between merges, and a rank's batches of one
weights.py         the weight of each replica, and the ranks' reports that weights are computed from
"""
