"""Mode "abs": delayed synchronous rounds of micro-batches (ABS-SGD).

delayed.py            the loader, and the optimizer's step, which works in rounds
rounds.py             the rounds, each as long as the reduction before; their options and messages
"""
