"""The exchange of a bucket: accumulate, select, exchange, apply.

exchange.py            the exchanges, sparse and dense: the method on one screen
bucket_exchange.py     a bucket, and the exchange that its compression asks for
buckets/               flat buffers of gradients
residual.py            what a rank has not sent yet
residual_state.py      a residual in a checkpoint, by the parameter's name
moments.py             Adam's moments, updated before the selection
adamw.py               AdamW steps of one rank, by a second moment that ranks share
sparse_gradients.py    the exchange of a parameter whose gradients are sparse
owned_exchanges.py     `Compression.shards`; dense sums inside a node, top-k between the nodes
sampling.py            which coordinates of a mean gradient the ranks exchange in a step
automatic.py           `Compression.auto`; algorithm_selector.py: how it chooses
calibration.py         measured rates of links, which predictions use
"""
