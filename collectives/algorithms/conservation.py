"""Track, merge by merge, which of this rank's picks survive and what returns to its residual.

A pick whose index a merge dropped is dead: it returns whole to the rank that picked it, also when
another branch brings the index back. What its value lost to rounding on the way is part of the
pick: it is struck off.

A rank that finds NaN or infinity refuses, in the messages of the reduction itself. From there on
ranks send empty lists, so that none waits and little is sent. Their headers hold the number of the
lowest rank that refused, and all ranks end with the same error.

A pick is alive while it can be part of the final result: one bit for each entry of a list.
Rounding errors of coded values are put back, each by exactly one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import NonFiniteError
from ..kernels import all_finite, contains, merge, sum_by_index
from ..vector import Array, SparseVector, module_of
from ..wire import NOBODY, Format


class ReductionResult(NamedTuple):
    """One rank's result of a sparse reduction, before it is split into (update, returned).

    dropped_picks:  this rank's picks that are no part of the update; they return whole.
    extra_returned: rounding errors.
    refused_by: the lowest rank that found NaN or infinity, or NOBODY; the same on every rank.
    """

    update: SparseVector
    dropped_picks: SparseVector
    extra_returned: SparseVector
    refused_by: int = NOBODY


def lowest_refusing(*ranks: int) -> int:
    """Return the lowest of the ranks that refused, or NOBODY."""
    return min((rank for rank in ranks if rank != NOBODY), default=NOBODY)


def check_finite(
    vector: SparseVector, rank: int, refused_by: int = NOBODY
) -> tuple[SparseVector, int]:
    """Return the vector and the lowest rank that refused; an empty vector if one has.

    rank: refuses when the vector is not finite. refused_by: the rank that has already.
    """
    if not all_finite(vector.values):
        refused_by = lowest_refusing(rank, refused_by)
    return (vector if refused_by == NOBODY else vector.take(slice(0)), refused_by)


def refused(selected: SparseVector, rank: int) -> ReductionResult:
    """Return the outcome of a reduction that a rank refused: all picks return."""
    nothing = selected.take(slice(0))
    return ReductionResult(nothing, selected, nothing, rank)


def split_result(outcome: ReductionResult) -> tuple[SparseVector, SparseVector]:
    """Return (update, returned); raise NonFiniteError when a rank refused."""
    if outcome.refused_by != NOBODY:
        raise NonFiniteError(outcome.refused_by)
    return outcome.update, sum_vectors([outcome.dropped_picks, outcome.extra_returned])


def sum_vectors(vectors: list[SparseVector]) -> SparseVector:
    """Return the sum, in new memory; if only one list is not empty, that list itself."""
    filled = [vector for vector in vectors if vector.indices.size]
    if len(filled) == 2:
        one, other = filled
        return merge(one, other, one.indices.size + other.indices.size)  # in one walk
    return sum_by_index(filled) if len(filled) > 1 else (filled or vectors)[0]


def intersect(vector: SparseVector, others: SparseVector) -> SparseVector:
    """Return the entries whose index the other vector has, too."""
    if not vector.indices.size:
        return vector  # saves the wait for a GPU's result
    return vector.where(contains(others.indices, vector.indices))


class Conservation:
    """One rank's picks, which of them are alive, and the further entries it must put back."""

    def __init__(self, picks: SparseVector) -> None:
        self.picks = picks
        # A comparison makes the mask on the device of the picks.
        self.alive = picks.indices == picks.indices  # all of them
        self._errors = picks.take(slice(0))

    def note_rounding(
        self,
        sent: SparseVector,
        rounded: SparseVector,
        format: Format,
        first: int = 0,
        step: int = 1,
    ) -> None:
        """Add this rank's share of the `rounding_error` of a list that it has sent."""
        if format.values != "exact":
            error = rounding_error(sent, rounded, format, first, step)
            self._errors = sum_vectors([self._errors, error])

    def note_merge(self, merged: SparseVector) -> None:
        """Take in a merge: picks that it dropped return whole, so their errors go."""
        self.alive = self.alive & contains(merged.indices, self.picks.indices)
        self._errors = intersect(self._errors, merged)

    def note_alive(self, alive: Array) -> None:
        """Take in which picks are alive, bool [picks], as another rank found out for this one."""
        self.alive = self.alive & alive
        self._errors = intersect(self._errors, self.picks.where(self.alive))

    def close(self, update: SparseVector, refused_by: int) -> ReductionResult:
        """Return the outcome."""
        return ReductionResult(update, self.picks.where(~self.alive), self._errors, refused_by)


def alive_bytes(count: int) -> int:
    """Return how many bytes the bits of `count` entries take."""
    return -(-count // 8)


def pack_alive(alive: Array) -> Array:
    """Return bool [m] as bits, uint8 [alive_bytes(m)]."""
    bits: Array = module_of(alive).packbits(alive)
    return bits


def unpack_alive(bits: Array, count: int) -> Array:
    """Return the first `count` bits as bool [count]."""
    # Cut afterwards, as CuPy's `unpackbits` has no count; and a view, as its bytes are 0 or 1.
    alive: Array = module_of(bits).unpackbits(bits)[:count].view(np.bool_)
    return alive


def rounding_error(
    vector: SparseVector, rounded: SparseVector, format: Format, first: int = 0, step: int = 1
) -> SparseVector:
    """Return the rounding errors vector - rounded, at positions first, first + step, ...

    `step` ranks that hold one list have the same errors, so each puts every step-th one back.
    """
    # Not the difference: in an exact format it is all zeros, at the cost of a pass over the list.
    if format.values == "exact":
        return vector.take(slice(0))
    share = slice(first, None, step)
    return vector.take(share).minus(rounded.take(share))
