"""The hot loops in NumPy, in chunks that stay in cache.

An order holds throughout: the larger |value| first, among equals the lower index. Exact zeros
are never selected, so fewer than k entries may come out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..vector import Array, SparseVector, index_dtype

# Two float32 chunks and their masks fit a 1 MiB L2 cache; measured the best of 16Ki..256Ki.
CHUNK = 1 << 16

# The order in which `squared_norm` adds.
NORM_CHUNK = 1 << 16
LANES = 16

# The next threshold is the value at this multiple of rank k. The k selected are cleared, so the
# next step's picks are today's ranks k+1 and on; aiming nearer to rank k misses too often.
SLACK = 2.2


def all_finite(array: Array) -> bool:
    """Tell whether a one-dimensional array holds neither NaN nor infinity."""
    return all(
        bool(np.isfinite(array[start : start + CHUNK]).all())
        for start in range(0, array.size, CHUNK)
    )


def squared_norm(array: Array) -> float:
    """Return the sum of squares in float64, in an order of additions that every twin follows.

    LANES running sums through each chunk, added up from the first to the last; then the chunks.
    """
    total = 0.0
    for start in range(0, array.size, NORM_CHUNK):
        squares = np.square(array[start : start + NORM_CHUNK], dtype=np.float64)
        whole = squares.size // LANES * LANES
        lanes = np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0)
        lanes[: squares.size - whole] += squares[whole:]
        chunk = 0.0
        for lane in lanes:
            chunk += float(lane)
        total += chunk
    return total


def select(dense: Array, k: int, threshold: float = 0.0) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold to begin the next search at.

    dense:     finite float32 or float64 [n], unchanged.
    threshold: a guess at the k-th largest |value|. It decides the time taken, never the result.
    """
    return _select(dense, None, k, threshold)


def accumulate_and_select(
    residual: Array, gradient: Array, k: int, threshold: float = 0.0
) -> tuple[SparseVector, float]:
    """Add `gradient` to `residual` in place and select from the sum, in one pass over memory.

    Both float32 or float64 [n], of one dtype. The selected entries stay in the residual.
    """
    if (gradient.dtype, gradient.shape) != (residual.dtype, residual.shape):
        raise ValueError(
            "the gradient must be of the residual's dtype and size, "
            f"{residual.dtype} {list(residual.shape)}, got {gradient.dtype} {list(gradient.shape)}"
        )
    return _select(residual, gradient, k, threshold)


def _select(
    dense: Array, addend: Array | None, k: int, threshold: float
) -> tuple[SparseVector, float]:
    if not 1 <= k <= dense.size:
        raise ValueError(f"k must lie in 1..{dense.size} (the vector's length), got {k}")
    search = _Search(dense, k)
    if threshold > 0.0:
        search.scan(threshold, addend)
    elif addend is not None:
        np.add(dense, addend, out=dense)
    if search.count < k:
        search.scan(_sampled_threshold(dense, k))
    if search.count < k:
        search.scan(0.0)
    return search.finish()


def _sampled_threshold(dense: Array, k: int) -> float:
    """Return about the value at rank SLACK * k; 0 where a sample would be too small to tell."""
    stride = min(33, k // 64) | 1  # odd: even strides meet the columns of even layers
    if stride < 3:
        return 0.0
    sample = np.abs(dense[::stride])
    rank = min(sample.size, round(SLACK * k / stride))
    return float(np.partition(sample, sample.size - rank)[sample.size - rank])


class _Search:
    """The candidates seen so far: never fewer than the k largest of what was scanned."""

    def __init__(self, dense: Array, k: int) -> None:
        self.dense = dense
        self.k = k
        self.limit = 4 * k + CHUNK
        self.above = np.empty(min(CHUNK, dense.size), np.bool_)
        self.below = np.empty_like(self.above)
        self.count = 0

    def scan(self, threshold: float, addend: Array | None = None) -> None:
        """Collect, anew, the nonzero entries not under the threshold, adding `addend` first."""
        self.pieces: list[tuple[Array, Array]] = []
        self.count = 0
        self.threshold = self._at_least(threshold)
        for start in range(0, self.dense.size, CHUNK):
            part = self.dense[start : start + CHUNK]
            if addend is not None:
                np.add(part, addend[start : start + CHUNK], out=part)
            # Two comparisons: |part| would be a third array to keep in cache.
            hits = np.greater_equal(part, self.threshold, out=self.above[: part.size])
            hits |= np.less_equal(part, -self.threshold, out=self.below[: part.size])
            found = np.flatnonzero(hits)
            if found.size:
                self.pieces.append((found + start, part[found]))
                self.count += found.size
                if self.count > self.limit:
                    self._prune()

    def _at_least(self, threshold: float) -> Any:
        """Return the threshold in the vector's dtype, above zero: zeros are no candidates."""
        smallest = np.nextafter(self.dense.dtype.type(0), self.dense.dtype.type(1))
        with np.errstate(over="ignore"):  # a threshold of another dtype may become infinity
            return max(self.dense.dtype.type(threshold), smallest)

    def _prune(self) -> None:
        """Keep the k largest so far; from here on only a larger |value| can displace one."""
        indices, values = self._gathered()
        magnitudes = np.abs(values)
        kept = largest(magnitudes, self.k)
        self.pieces = [(indices[kept], values[kept])]
        self.count = self.k
        with np.errstate(over="ignore"):  # nothing is larger than the largest number
            self.threshold = np.nextafter(magnitudes[kept].min(), self.dense.dtype.type(np.inf))

    def _gathered(self) -> tuple[Array, Array]:
        if not self.pieces:
            return np.empty(0, np.intp), np.empty(0, self.dense.dtype)
        indices, values = zip(*self.pieces, strict=True)
        return np.concatenate(indices), np.concatenate(values)

    def finish(self) -> tuple[SparseVector, float]:
        """Return the k largest candidates and the next threshold."""
        indices, values = self._gathered()
        indices = indices.astype(index_dtype(self.dense.size))
        everything = SparseVector(indices, values, self.dense.size)
        if self.count < self.k:
            return everything, 0.0
        magnitudes = np.abs(values)
        return everything.where(largest(magnitudes, self.k)), self._next_threshold(magnitudes)

    def _next_threshold(self, magnitudes: Array) -> float:
        """Return the value at rank SLACK * k, extrapolated when fewer candidates were seen."""
        count, k = magnitudes.size, self.k
        rank = round(SLACK * k)
        if rank <= count:
            return float(np.partition(magnitudes, count - rank)[count - rank])
        lowest = float(magnitudes.min())
        if count == k:
            return lowest / 2
        at_k = float(np.partition(magnitudes, count - k)[count - k])
        slope = (at_k - lowest) / (count - k)
        return max(lowest - slope * (rank - count), lowest / 2)


def largest(magnitudes: Array, k: int) -> Array:
    """Return a mask, bool [n], of the k largest; among equals those with the lower position."""
    count = magnitudes.size
    if count <= k:
        return np.ones(count, np.bool_)
    at_k = np.partition(magnitudes, count - k)[count - k]
    kept: Array = magnitudes > at_k
    ties = np.flatnonzero(magnitudes == at_k)
    kept[ties[: k - np.count_nonzero(kept)]] = True
    return kept


def merge(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Return the k largest entries of a + b, and the other nonzero entries of a + b.

    One float addition for an index in both, hence the same bits for (a, b) and (b, a).
    """
    total = sum_by_index([a, b])
    kept = largest(np.abs(total.values), k)
    return total.where(kept), total.where(~kept)


def sum_by_index(vectors: list[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    first = vectors[0]
    indices = np.concatenate([vector.indices for vector in vectors])
    if not indices.size:
        return first
    # Stable: keeps the list's order within an index, and is linear on runs sorted already.
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    values = np.concatenate([vector.values for vector in vectors])[order]
    starts = np.concatenate(([True], indices[1:] != indices[:-1]))
    sums = np.zeros(np.count_nonzero(starts), values.dtype)
    # Not add.reduceat: from eight addends on that adds pairwise, in an order of its own.
    np.add.at(sums, np.cumsum(starts) - 1, values)
    return SparseVector(indices[starts], sums, first.length).where(sums != 0)


def contains(indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices` (both sorted): bool [wanted]."""
    if not indices.size:
        return np.zeros(wanted.size, np.bool_)
    at = np.searchsorted(indices, wanted)
    at[at == indices.size] = 0
    found: Array = indices[at] == wanted
    return found


def add_at(dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    dense[vector.indices] += vector.values
