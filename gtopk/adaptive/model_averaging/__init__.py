"""Mode "adaptive-sgd": every rank trains a replica of its own, and replicas are merged.

loader.py          the loader, and the merge between mega-batches
options.py         what the mode knows
strategies.py      Adaptive SGD and its rivals
mega_batches.py    what all know alike of the stretches between merges
taken_batches.py   what a rank takes of one
batch_scaling.py   from the updates made in one to the sizes of the next
weights.py         how much each replica counts
report_wire.py     what ranks tell each other of themselves in a merge
"""
