"""Mode "abs": delayed synchronous rounds of micro-batches (ABS-SGD).

delayed.py            the loader, and the optimizer whose steps are rounds
rounds.py             batches last until the reduction before is through
round_wire.py         what ranks do together for it
agreed_settings.py    learning rates and the like, alike on all ranks
"""
