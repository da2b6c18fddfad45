"""By host: a GPU's vector is reduced by way of the host, where every transport and format works.

GPU     selected                         update, returned
           | k entries                          ^ as many as there are
host       +--> reduction among the hosts ------+
"""

from __future__ import annotations

from collections.abc import Callable

from ..vector import SparseVector

Reduction = Callable[[SparseVector], tuple[SparseVector, SparseVector]]


def by_host(reduction: Reduction, selected: SparseVector) -> tuple[SparseVector, SparseVector]:
    """Return what the reduction of the copies gives, with arrays on the current GPU.

    selected: on the current GPU, whose current stream orders the copies.
    """
    update, returned = reduction(selected.on_host())
    return update.beside(selected.values), returned.beside(selected.values)
