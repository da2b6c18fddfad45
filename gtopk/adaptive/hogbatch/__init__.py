"""Hogbatch: the ranks of a node update one shared model, without locks and without waiting.

Ma and Rusu 2020 (arXiv 2004.08771). Their coordinator's messages are words in shared memory here:

    theirs                          here
    a worker asks for a batch       claims the next samples of its own size     ledger.py
    the coordinator sizes it        the worker does, from everybody's counts    sizes.py
    CPU: update the shared model    in place                                    workers_batch.py
    GPU: copy, step, copy back      copy, gradient, update in place with it     shared_model.py
    the updates each has made       a row of the board                          ledger.py

loader.py          a worker's epochs, and `evaluate`; report.py: its mean loss, and reports
node.py            the workers of one host and their memory; merging between nodes
workers_batch.py   a worker's claims, the step that it takes with each, and what races have lost
options.py         options, and which jobs are refused
"""
