"""The exchange of a bucket: accumulate, select, exchange, apply.

exchange.py            the exchanges, sparse and dense: the method on one screen
bucket_exchange.py     one bucket and the exchange that its compression calls for
buckets/               flat buffers of gradients
residual.py            the values that a rank has not sent yet
residual_state.py      residuals in checkpoints, keyed by parameter name
moments.py             Adam's moments, updated before the selection
adamw.py               local AdamW steps, divided by a second moment that all ranks share
sparse_gradients.py    the exchange of a parameter with sparse gradients
owned_exchanges.py     `Compression.shards`, and dense sums inside a node with top-k between nodes
sampling.py            the coordinates of the mean gradient that the ranks exchange in a step
automatic.py           `Compression.auto`; algorithm_selector.py: how it chooses
calibration.py         measured rates of links and kernels, used by the predictions
"""
