"""One rank's result of a sparse reduction, before it is split into (update, returned).

A rank that finds NaN or infinity says so in the messages of the reduction itself. From there on
empty lists travel in place of entries, so that nobody waits and little is sent; the number of the
lowest rank that refused travels in their headers, and all ranks end alike.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import NonFiniteError
from ..kernels import all_finite, contains, merge, sum_by_index
from ..vector import SparseVector
from ..wire import NOBODY


class Outcome(NamedTuple):
    """The agreed update, and what this rank puts back into its residual.

    dead:  this rank's picks that are no part of the update; they return whole.
    extra: rounding errors, and shares of what merges dropped.
    refused_by: the lowest rank that found NaN or infinity, or NOBODY; the same on every rank.
    """

    update: SparseVector
    dead: SparseVector
    extra: SparseVector
    refused_by: int = NOBODY


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


def refused(selected: SparseVector, rank: int) -> Outcome:
    """Return the outcome of a reduction that a rank refused: nothing happened."""
    nothing = selected.at(slice(0))
    return Outcome(nothing, selected, nothing, rank)


def settle(outcome: Outcome) -> tuple[SparseVector, SparseVector]:
    """Return (update, returned); raise NonFiniteError when a rank refused."""
    if outcome.refused_by != NOBODY:
        raise NonFiniteError(outcome.refused_by)
    return outcome.update, put_together([outcome.dead, outcome.extra])


def put_together(vectors: list[SparseVector]) -> SparseVector:
    """Return the sum, in memory of its own; a single list that is not empty as it is."""
    filled = [vector for vector in vectors if vector.entries]
    if len(filled) == 2:
        one, other = filled
        return merge(one, other, one.entries + other.entries)[0]  # in one walk
    return sum_by_index(filled) if len(filled) > 1 else (filled or vectors)[0]


def among(vector: SparseVector, others: SparseVector) -> SparseVector:
    """Return the entries whose index the other vector has, too."""
    if not vector.entries:
        return vector  # on a GPU the host would wait to learn that
    return vector.where(contains(others.indices, vector.indices))
