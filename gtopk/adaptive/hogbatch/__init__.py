"""Hogbatch: the ranks of a node update one shared model, without locks and without waiting.

Ma and Rusu 2020 (arXiv 2004.08771). Shared memory replaces their coordinator's messages:

    theirs                          here
    a worker asks for a batch       claims the next samples of its own size     ledger.py
    the coordinator sizes it        the worker does, from all workers' counts   sizes.py
    CPU: update the shared model    in place                                    workers_batch.py
    GPU: copy, step, copy back      copy, gradient, update in place with it     shared_model.py
    the updates of each worker      a row of the worker table                   ledger.py

loader.py          a worker's epochs, and `evaluate`; report.py: its mean loss, and reports
node.py            the workers of one host and their memory; merging between nodes
workers_batch.py   a worker's claims, the step that it takes with each, and the loss by races
options.py         options, and the jobs that are refused
"""
