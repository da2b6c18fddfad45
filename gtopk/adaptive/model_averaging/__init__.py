"""Mode "adaptive-sgd": every rank trains a replica, and the replicas are merged.

loader.py          the loader, and the merge between mega-batches
options.py         options, strategies (Adaptive SGD and the ones it is compared with), batch
                   scaling, and mega-batches: the stretches between merges, and a rank's batches
weights.py         the weight of each replica, and the ranks' reports that determine it
"""
