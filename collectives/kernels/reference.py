"""The hot loops in NumPy, in chunks that stay in cache: the specification of the other twins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from ..vector import (
    Array,
    Gradient,
    Momentum,
    SparseVector,
    host_parts,
    index_dtype,
    require_selectable,
)
from .narrow import widen_bfloat16
from .reference_indices import in_order, pack_indices, unpack_indices  # noqa: F401 - of this twin
from .reference_values import pack_values, unpack_values  # noqa: F401 - likewise

# A multiple of 8. Smaller chunks cost calls, larger ones leave the cache. For 25.6 million elements
# it took 3.4 times the time of reading memory with 64Ki, 3.1 with 128Ki, 2.7 with 256Ki, 2.6 with
# 512Ki.
CHUNK = 1 << 18

# These define the order in which `squared_norm` adds.
NORM_CHUNK: Final = 1 << 16
LANES: Final = 16

# The next threshold is the |value| at rank AIM * k + AIM_AT_LEAST. The k selected entries are
# cleared, so today's ranks from k+1 on are the next step's candidates. A threshold nearer to rank k
# would too often let fewer than k pass.
AIM: Final = 2.2
AIM_AT_LEAST: Final = 256

_ALL_TRUE: Final = np.frombuffer(b"\1" * 8, np.uint64)[0]  # eight bools as one word


def all_finite(array: Array) -> bool:
    """Tell whether every element is finite."""
    # 16-bit floats by their bits, as NumPy has no bfloat16: finite ones are below infinity's.
    bits = array.view(np.uint16) if array.itemsize == 2 else array
    chunks = (bits[start : start + CHUNK] for start in range(0, array.size, CHUNK))
    if array.itemsize == 2:
        infinity = 0x7C00 if array.dtype == np.float16 else 0x7F80
        return all(bool((chunk & 0x7FFF < infinity).all()) for chunk in chunks)
    return all(bool(np.isfinite(chunk).all()) for chunk in chunks)


def squared_norm(array: Array) -> float:
    """Return the sum of squares: LANES running sums per chunk are added up, then the chunks."""
    total = 0.0
    for start in range(0, array.size, NORM_CHUNK):
        squares = np.square(array[start : start + NORM_CHUNK], dtype=np.float64)
        whole = squares.size // LANES * LANES
        # Over the first axis NumPy adds row after row: each column is a running sum.
        lanes = np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0)
        lanes[: squares.size - whole] += squares[whole:]
        chunk = 0.0
        # One by one: NumPy's `sum` would add pairwise.
        for lane in lanes:
            chunk += float(lane)
        total += chunk
    return total


def select(dense: Array, k: int, threshold: float = 0.0) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold for the next search."""
    require_selectable(dense, k)
    return _select(_Search(dense, k), ((start, None) for start in _starts(dense)), threshold)


def accumulate_and_select(*arguments: Any, **options: Any) -> tuple[SparseVector, float]:
    """Do what `search` does; return its result without the number of passes."""
    picked, next_threshold, _ = search(*arguments, **options)
    return picked, next_threshold


def search(
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
    into: Array | None = None,
) -> tuple[SparseVector, float, int]:
    """Add to `residual`, in place or into other memory, and select from the sum.

    Returns the entries, the next threshold, and the number of passes over the residual.
    """
    parts = host_parts(residual, gradient, k, momentum, into)
    state = _Search(residual if into is None else into, k, residual)
    picked, next_threshold = _select(state, _addends(residual, parts, momentum, weight), threshold)
    return picked, next_threshold, state.scans


def _starts(dense: Array) -> range:
    return range(0, dense.size, CHUNK)


def _addends(
    residual: Array, parts: Sequence[Array], momentum: Momentum | None, weight: float
) -> Iterator[tuple[int, Array]]:
    """Yield each chunk's start in the residual and the values to add there."""
    begin = 0
    for part in parts:
        for start in range(0, part.size, CHUNK):
            addend = part[start : start + CHUNK]
            if addend.dtype == np.uint16:
                addend = widen_bfloat16(addend)
            if weight != 1.0:
                # In the residual's dtype: 16-bit gradients are widened before they are weighted.
                addend = np.multiply(addend, residual.dtype.type(weight), dtype=residual.dtype)
            if momentum is not None:
                here = slice(begin + start, begin + start + addend.size)
                into = momentum.velocity if momentum.into is None else momentum.into
                factor = residual.dtype.type(momentum.factor)
                velocity = np.multiply(momentum.velocity[here], factor, out=into[here])
                velocity += addend
                addend = velocity
            yield begin + start, addend
        begin += part.size


def _select(
    search: _Search, chunks: Iterator[tuple[int, Array | None]], threshold: float
) -> tuple[SparseVector, float]:
    if threshold > 0.0:
        search.scan(chunks, threshold)
    else:
        for start, addend in chunks:
            if addend is not None:
                search.add(start, addend)
        search.scans += 1
    if search.count < search.k:
        # There was no guess, or a bad one. The sum is complete now, and can be sampled.
        search.scan_again(_sampled_threshold(search.dense, search.k))
    if search.count < search.k:
        # The sample misled: take everything as a candidate, and prune on the way.
        search.scan_again(0.0)
    return search.finish()


def _aim(k: int) -> int:
    return round(AIM * k) + AIM_AT_LEAST


def _sampled_threshold(dense: Array, k: int) -> float:
    """Estimate the |value| at the target rank; 0 if a sample would be too small."""
    stride = min(33, k // 64) | 1  # odd: an even one may stay in a matrix's even columns
    if stride < 3:
        return 0.0
    sample = np.abs(dense[::stride])
    rank = min(sample.size, _aim(k) // stride)
    at_rank = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    return at_rank if np.isfinite(at_rank) else 0.0


def keys(values: Array) -> Array:
    """Return integers ordered like |x|: 0 for zeros; infinity, then NaN, above all numbers."""
    width = np.dtype(f"i{values.dtype.itemsize}")
    return values.view(width) & np.iinfo(width).max


class _Search:
    """The candidates seen so far: they always include the k largest entries scanned."""

    def __init__(self, dense: Array, k: int, before: Array | None = None) -> None:
        self.dense = dense
        self._before = dense if before is None else before
        self.k = k
        # Prune beyond this: with a guess far too low, the whole vector would be candidates.
        self.limit = 4 * k + CHUNK
        room = -(-min(CHUNK, dense.size) // 8) * 8
        self.below, self.above = np.empty((2, room), np.bool_)
        self.count = 0
        self.scans = 0

    def add(self, start: int, addend: Array) -> None:
        """Set part of the vector to its old values plus an addend."""
        here = slice(start, start + addend.size)
        np.add(self._before[here], addend, out=self.dense[here])

    def scan_again(self, threshold: float) -> None:
        """Collect anew; the addends are in the dense vector already."""
        self.scan(((start, None) for start in _starts(self.dense)), threshold)

    def scan(self, chunks: Iterator[tuple[int, Array | None]], threshold: float) -> None:
        """Add the addends, and collect the nonzero entries with |value| >= threshold."""
        self.scans += 1
        self.pieces: list[tuple[Array, Array]] = []
        self.count = 0
        self.threshold = self._at_least(threshold)
        for start, addend in chunks:
            part = self.dense[start : start + (CHUNK if addend is None else addend.size)]
            if addend is not None:
                self.add(start, addend)
            found = self._hits(part)
            if found.size:
                self.pieces.append((found + start, part[found]))
                self.count += found.size
                if self.count > self.limit:
                    self._prune()

    def _hits(self, part: Array) -> Array:
        """Return the positions in a chunk of entries with |value| >= threshold, NaN included."""
        if np.isnan(self.threshold):  # k NaN were seen: only a NaN with a larger key is above
            return np.flatnonzero(keys(part) >= keys(self.threshold))
        # Two comparisons, as |part| would be another array to keep in cache. Both are false for
        # NaN, which so is no miss.
        misses, size = self.below, -(-part.size // 8) * 8
        misses[part.size : size] = True
        np.less(part, self.threshold, out=misses[: part.size])
        misses[: part.size] &= np.greater(part, -self.threshold, out=self.above[: part.size])
        # Hits are rare: test eight bools at a time as one word, then only the words with a hit. It
        # does not pay if more than an eighth of the words have one.
        words = np.flatnonzero(misses[:size].view(np.uint64) != _ALL_TRUE)
        if words.size > size >> 6:
            return np.flatnonzero(~misses[:size])
        inside = np.flatnonzero(~misses[:size].reshape(-1, 8)[words])
        return (words[inside >> 3] << 3) + (inside & 7)

    def _at_least(self, threshold: float) -> Any:
        """Return the threshold in the vector's dtype; positive, as zeros are not selected."""
        smallest = np.nextafter(self.dense.dtype.type(0), self.dense.dtype.type(1))
        with np.errstate(over="ignore"):  # a float64 threshold may become float32's infinity
            return max(self.dense.dtype.type(threshold), smallest)

    def _prune(self) -> None:
        """Keep the k largest so far, and raise the threshold above the least of them."""
        indices, values = self._gathered()
        ranks = keys(values)
        kept = largest(ranks, self.k)
        self.pieces = [(indices[kept], values[kept])]
        self.count = self.k
        # The next larger key, as later entries lose ties; the largest key has none.
        lowest = ranks[kept].min()
        self.threshold = min(lowest + 1, np.iinfo(ranks.dtype).max).view(self.dense.dtype)

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
        threshold = self._next_threshold(np.abs(values))
        return everything.where(largest(keys(values), self.k)), threshold

    def _next_threshold(self, magnitudes: Array) -> float:
        """Return the |value| at the target rank, extrapolated if there are fewer candidates.

        0, for no threshold, if that is not finite.
        """
        count, k = magnitudes.size, self.k
        rank = _aim(k)
        if rank <= count:
            next_threshold = float(np.partition(magnitudes, count - rank)[count - rank])
            return next_threshold if np.isfinite(next_threshold) else 0.0
        lowest = float(magnitudes.min())
        if not np.isfinite(lowest):
            return 0.0
        # All candidates were selected, so nothing shows how values fall from rank k on.
        if count == k:
            return lowest / 2
        at_k = float(np.partition(magnitudes, count - k)[count - k])
        slope = (at_k - lowest) / (count - k)
        return max(lowest - slope * (rank - count), lowest / 2)


def largest(ranks: Array, k: int) -> Array:
    """Return a mask, bool [n], of the k largest keys; among equals the first ones."""
    count = ranks.size
    if count <= k:
        return np.ones(count, np.bool_)
    at_k = np.partition(ranks, count - k)[count - k]
    kept: Array = ranks > at_k
    ties = np.flatnonzero(ranks == at_k)
    kept[ties[: k - np.count_nonzero(kept)]] = True
    return kept


def merge(a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b."""
    total = sum_by_index([a, b])
    return total.where(largest(keys(total.values), k))


def sum_by_index(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    first = vectors[0]
    indices = np.concatenate([vector.indices for vector in vectors])
    if not indices.size:
        return first
    # Stable: keeps the vectors' order within an index, and is linear on sorted runs.
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    values = np.concatenate([vector.values for vector in vectors])[order]
    starts = np.concatenate(([True], indices[1:] != indices[:-1]))
    sums = np.zeros(np.count_nonzero(starts), values.dtype)
    # Not add.reduceat, which adds eight or more addends pairwise, in another order.
    np.add.at(sums, np.cumsum(starts) - 1, values)
    return SparseVector(indices[starts], sums, first.length).where(sums != 0)


def contains(indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices` (both sorted): bool [wanted]."""
    if not indices.size:
        return np.zeros(wanted.size, np.bool_)
    at = np.searchsorted(indices, wanted)
    # Indices larger than the last are compared with the first, which differs.
    at[at == indices.size] = 0
    return indices[at] == wanted


def add_at(dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    dense[vector.indices] += vector.values


def clear_at(dense: Array, indices: Array) -> None:
    """Set the elements of a dense array at these indices to zero."""
    dense[indices] = 0


def clear(dense: Array) -> None:
    """Set all elements of an array to zero."""
    dense[...] = 0


# ---- the checksum of any bytes, by 32-bit multiplications, which all machines do fast
#
#     data      | block 0 | block 1 | ... | last, padded with zeros |      4096 bytes each
#     block     sum of ((low_i + a_i) mod 2^32) * ((high_i + b_i) mod 2^32)   over its 64-bit words
#     total     h = (h + block) * STEP for each block, from h = seed + bytes; then mixed; mod 2^64
#
# A block's sum is the NH hash of UMAC (Black et al. 1999, section 4), with keys a_i, b_i from
# SplitMix64 (Steele et al. 2014). The keys are public: it guards against accidents, not against
# adversaries. With random keys, NH of two texts collides with a probability of at most 2^-32. Here
# damage to one 32-bit half of a word goes unnoticed only if the other half is the negative of its
# key (one value in 2^32), damage all over a message with a probability of about 2^-64.

BLOCK_BYTES: Final = 4096
STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def mix(number: int) -> int:
    """Return SplitMix64's output function, a bijection of 64 bits in which each bit affects all."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


# Key i is for the i-th 64-bit word of a block, half for half.
_KEYS: Final = np.array(
    [mix((i + 1) * STEP & _MASK) for i in range(BLOCK_BYTES // 8)], np.uint64
).view(np.uint32)


def checksum(data: Array, seed: int = 0) -> int:
    """Return a 64-bit checksum of `data` (uint8 [n]); seed: that of the bytes before it."""
    whole = data.size // BLOCK_BYTES * BLOCK_BYTES
    rest = data[whole:]
    padded = np.zeros(-(-rest.size // 8) * 8, np.uint8)
    padded[: rest.size] = rest
    blocks = _sums(data[:whole].view(np.uint32).reshape(-1, _KEYS.size)).tolist()
    if rest.size:
        blocks += _sums(padded.view(np.uint32).reshape(1, -1)).tolist()
    total = (seed + data.size) & _MASK
    for block in blocks:
        total = (total + block) * STEP & _MASK
    return mix(total)


def _sums(words: Array) -> Array:
    """Return the NH of each row of words, uint32 [blocks, 2 m]."""
    keyed = words + _KEYS[: words.shape[1]]
    products = keyed[:, ::2].astype(np.uint64) * keyed[:, 1::2]
    return products.sum(axis=1, dtype=np.uint64)
