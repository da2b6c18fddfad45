"""Track, merge by merge, which of this rank's picks survive and what returns to its residual.

A pick is alive as long as it can still be part of the final result; messages say so with one bit
per entry. If a merge drops its index it is dead, and returns whole to the rank that picked it, even
if another branch brings the index back. Earlier rounding errors of a dead pick are discarded, as
they are part of it. All others are returned, each by exactly one rank.

A rank that finds NaN or infinity refuses: the headers of its messages say so. From then on ranks
exchange empty lists, so that none waits for a message. The headers hold the lowest rank that
refused, and in the end all ranks raise the same error.
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

    dropped_picks:  this rank's picks that are not in the update; they return whole.
    extra_returned: the rounding errors that this rank returns.
    refused_by: the lowest rank that found NaN or infinity, or NOBODY; the same on every rank.
    """

    update: SparseVector
    dropped_picks: SparseVector
    extra_returned: SparseVector
    refused_by: int = NOBODY


def lowest_refusing(*ranks: int) -> int:
    """Return the lowest of the ranks that is not NOBODY, or NOBODY."""
    return min((rank for rank in ranks if rank != NOBODY), default=NOBODY)


def check_finite(
    vector: SparseVector, rank: int, refused_by: int = NOBODY
) -> tuple[SparseVector, int]:
    """Return the vector, or an empty one if a rank refused, and the lowest refusing rank.

    rank: the one that refuses if the vector is not finite. refused_by: a rank that has already.
    """
    if not all_finite(vector.values):
        refused_by = lowest_refusing(rank, refused_by)
    return (vector if refused_by == NOBODY else vector.take(slice(0)), refused_by)


def refused_result(selected: SparseVector, rank: int) -> ReductionResult:
    """Return the result of a reduction that a rank refused: all picks return."""
    empty = selected.take(slice(0))
    return ReductionResult(empty, selected, empty, rank)


def split_result(result: ReductionResult) -> tuple[SparseVector, SparseVector]:
    """Return (update, returned); raise NonFiniteError if a rank refused."""
    if result.refused_by != NOBODY:
        raise NonFiniteError(result.refused_by)
    return result.update, sum_vectors([result.dropped_picks, result.extra_returned])


def sum_vectors(vectors: list[SparseVector]) -> SparseVector:
    """Return the sum, in new memory; if at most one vector is not empty, that vector itself."""
    nonempty = [vector for vector in vectors if vector.indices.size]
    if len(nonempty) == 2:
        one, other = nonempty
        return merge(one, other, one.indices.size + other.indices.size)  # faster for two
    return sum_by_index(nonempty) if len(nonempty) > 1 else (nonempty or vectors)[0]


def intersect(vector: SparseVector, others: SparseVector) -> SparseVector:
    """Return the entries of `vector` whose index `others` has, too."""
    if not vector.indices.size:
        return vector  # saves waiting for a GPU
    return vector.where(contains(others.indices, vector.indices))


class Conservation:
    """One rank's picks, which of them are alive, and the rounding errors that it returns.

    Call `note_rounding` for each list sent, then `note_merge` for the merge; `close` at the end.
    """

    def __init__(self, picks: SparseVector) -> None:
        self.picks = picks
        # All of them. The comparison creates the mask on the device of the picks.
        self.alive = picks.indices == picks.indices
        self._errors = picks.take(slice(0))

    def note_rounding(
        self,
        sent: SparseVector,
        rounded: SparseVector,
        format: Format,
        first: int = 0,
        step: int = 1,
    ) -> None:
        """Add this rank's share of the rounding error of a list sent; see `rounding_error`."""
        if format.values != "exact":
            error = rounding_error(sent, rounded, format, first, step)
            self._errors = sum_vectors([self._errors, error])

    def note_merge(self, merged: SparseVector) -> None:
        """Mark the picks that a merge dropped as dead, and discard their rounding errors."""
        self.alive = self.alive & contains(merged.indices, self.picks.indices)
        self._errors = intersect(self._errors, merged)

    def note_alive(self, alive: Array) -> None:
        """Note which picks are alive, bool [picks], as another rank found for this one."""
        self.alive = self.alive & alive
        self._errors = intersect(self._errors, self.picks.where(self.alive))

    def close(self, update: SparseVector, refused_by: int) -> ReductionResult:
        """Return this rank's result."""
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
    # CuPy's `unpackbits` takes no count, hence the slice. Bytes of 0 or 1 are valid bools.
    alive: Array = module_of(bits).unpackbits(bits)[:count].view(np.bool_)
    return alive


def rounding_error(
    vector: SparseVector, rounded: SparseVector, format: Format, first: int = 0, step: int = 1
) -> SparseVector:
    """Return the rounding errors vector - rounded, at positions first, first + step, ...

    `step` ranks that sent the same list have the same errors, so each returns every step-th one.
    """
    # Exact formats have no errors: skip computing the difference.
    if format.values == "exact":
        return vector.take(slice(0))
    share = slice(first, None, step)
    return vector.take(share).minus(rounded.take(share))
