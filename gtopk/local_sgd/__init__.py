"""LocalSGD: ranks step by themselves, and combine their changes at intervals (DiLoCo).

local_sgd.py        rounds of inner steps, and the outer step that ends one
fragments.py        parts of the model with rounds that end in turn
outer_exchange.py   the changes of all replicas in a round, reduced to one gradient
"""

from .local_sgd import LocalSGD, averaging, nesterov

__all__ = ["LocalSGD", "averaging", "nesterov"]
