"""The exchange of a bucket: accumulate, select, exchange, apply.

exchange.py          the method on one screen
bucket_exchange.py   a bucket, how it is exchanged, and what its gradients were
sparse_gradients.py  the same of one parameter whose gradients are sparse
residual_state.py    what checkpoints have of a residual, by parameter
residual_names.py    residuals of parameters that are named otherwise now
residual.py          what was not sent yet
moments.py           Adam's, before the selection
node_exchange.py     sums inside a node, picks between the nodes
exchanges.py         which exchange a compression stands for
automatic.py         the one that runs what a selector says
algorithm_selector.py from predictions first, from measurements then
calibration.py       what the predictions go by
"""
