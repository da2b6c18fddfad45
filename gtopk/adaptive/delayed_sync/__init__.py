"""Mode "abs": delayed synchronous rounds of micro-batches (ABS-SGD).

delayed.py            the loader, and the optimizer whose steps are rounds
rounds.py             rounds last until the reduction before is through; their settings and messages
"""
