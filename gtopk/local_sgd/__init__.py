"""LocalSGD: ranks step by themselves, and combine their changes at intervals (DiLoCo).

local_sgd.py        rounds of inner steps, and the outer step that ends one
outer_exchange.py   what replicas have changed in a round, reduced to one gradient
outer_optimizer.py  its options, which all ranks have alike, and its step of the center
"""

from .local_sgd import LocalSGD, averaging, nesterov

__all__ = ["LocalSGD", "averaging", "nesterov"]
