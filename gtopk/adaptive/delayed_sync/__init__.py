"""Mode "abs": delayed synchronous rounds of micro-batches (ABS-SGD).

delayed.py            the loader, and the optimizer whose steps are rounds
rounds.py             the rounds, each as long as the reduction before; their settings and messages
"""
