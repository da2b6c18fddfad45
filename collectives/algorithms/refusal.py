"""Refusal: a rank that finds NaN or infinity says so in the messages of the reduction itself.

From there on empty lists travel in place of entries, so that nobody waits and little is sent; the
number of the lowest rank that refused travels in their headers, and all ranks end alike.
"""

from __future__ import annotations

from ..kernels import all_finite
from ..vector import SparseVector
from ..wire import NOBODY


def lowest(*ranks: int) -> int:
    """Return the lowest of the ranks that refused, or NOBODY."""
    return min((rank for rank in ranks if rank != NOBODY), default=NOBODY)


def examine(vector: SparseVector, rank: int, refused_by: int = NOBODY) -> tuple[SparseVector, int]:
    """Return the vector and who refused; when anybody has, nothing in place of the vector.

    rank: who refuses when the vector is not finite. refused_by: who has already.
    """
    if not all_finite(vector.values):
        refused_by = lowest(rank, refused_by)
    return (vector if refused_by == NOBODY else vector.at(slice(0)), refused_by)
