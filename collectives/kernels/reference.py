"""The hot loops in NumPy, in chunks that stay in cache: the reference for the other twins."""

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

# A multiple of 8. Smaller chunks cost calls, larger ones leave the cache: 25.6 million elements
# took 3.4 times the floor with 64Ki, 3.1 with 128Ki, 2.7 with 256Ki, 2.6 with 512Ki.
CHUNK = 1 << 18

# The order in which `squared_norm` adds.
NORM_CHUNK: Final = 1 << 16
LANES: Final = 16

# The next threshold is the value at this multiple of rank k, and some more where k is small. The k
# selected are cleared, so the next step's picks are today's ranks k+1 and on; aiming nearer to
# rank k misses too often.
AIM: Final = 2.2
AIM_AT_LEAST: Final = 256

_MISSES: Final = np.frombuffer(b"\1" * 8, np.uint64)[0]  # eight bools in one word


def all_finite(array: Array) -> bool:
    """Tell whether every element is finite."""
    # By the bits, as NumPy has no bfloat16: those below infinity's are finite.
    bits = array.view(np.uint16) if array.itemsize == 2 else array
    chunks = (bits[start : start + CHUNK] for start in range(0, array.size, CHUNK))
    if array.itemsize == 2:
        infinity = 0x7C00 if array.dtype == np.float16 else 0x7F80
        return all(bool((chunk & 0x7FFF < infinity).all()) for chunk in chunks)
    return all(bool(np.isfinite(chunk).all()) for chunk in chunks)


def squared_norm(array: Array) -> float:
    """Add LANES running sums through each chunk, from the first to the last; then the chunks."""
    total = 0.0
    for start in range(0, array.size, NORM_CHUNK):
        squares = np.square(array[start : start + NORM_CHUNK], dtype=np.float64)
        whole = squares.size // LANES * LANES
        # Over the first axis NumPy adds row after row: each column is a running sum.
        lanes = np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0)
        lanes[: squares.size - whole] += squares[whole:]
        chunk = 0.0
        # One after the other, as NumPy's `sum` adds pairwise.
        for lane in lanes:
            chunk += float(lane)
        total += chunk
    return total


def select(dense: Array, k: int, threshold: float = 0.0) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold for the next search."""
    require_selectable(dense, k)
    return _select(_Search(dense, k), ((start, None) for start in _starts(dense)), threshold)


def accumulate_and_select(*arguments: Any, **options: Any) -> tuple[SparseVector, float]:
    """Return as `search`, but for the number of passes."""
    picked, following, _ = search(*arguments, **options)
    return picked, following


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
    looking = _Search(residual if into is None else into, k, residual)
    picked, following = _select(looking, _addends(residual, parts, momentum, weight), threshold)
    return picked, following, looking.scans


def _starts(dense: Array) -> range:
    return range(0, dense.size, CHUNK)


def _addends(
    residual: Array, parts: Sequence[Array], momentum: Momentum | None, weight: float
) -> Iterator[tuple[int, Array]]:
    """Yield, chunk by chunk, its beginning in the residual and the values to add."""
    begin = 0
    for part in parts:
        for start in range(0, part.size, CHUNK):
            addend = part[start : start + CHUNK]
            if addend.dtype == np.uint16:
                addend = widen_bfloat16(addend)
            if weight != 1.0:
                # In the residual's dtype: a gradient of 16 bits is widened before it is weighted.
                addend = np.multiply(addend, residual.dtype.type(weight), dtype=residual.dtype)
            if momentum is not None:
                here = slice(begin + start, begin + start + addend.size)
                faster = momentum.velocity if momentum.into is None else momentum.into
                factor = residual.dtype.type(momentum.factor)
                velocity = np.multiply(momentum.velocity[here], factor, out=faster[here])
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
        # Without a guess, or after a bad one: only now is there a sum to take a sample of.
        search.scan_again(_sampled_threshold(search.dense, search.k))
    if search.count < search.k:
        # The sample misled: everything counts as a candidate, and is pruned on the way.
        search.scan_again(0.0)
    return search.finish()


def _aim(k: int) -> int:
    return round(AIM * k) + AIM_AT_LEAST


def _sampled_threshold(dense: Array, k: int) -> float:
    """Return about the value at the rank aimed at; 0 where a sample would be too small to tell."""
    stride = min(33, k // 64) | 1  # odd: even strides meet the columns of even layers
    if stride < 3:
        return 0.0
    sample = np.abs(dense[::stride])
    rank = min(sample.size, _aim(k) // stride)
    at_rank = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    return at_rank if np.isfinite(at_rank) else 0.0


def keys(values: Array) -> Array:
    """Return integers in the order of |x|, with infinity and then NaN on top and zero at 0."""
    width = np.dtype(f"i{values.dtype.itemsize}")
    return values.view(width) & np.iinfo(width).max


class _Search:
    """The candidates seen so far: never fewer than the k largest of what was scanned."""

    def __init__(self, dense: Array, k: int, before: Array | None = None) -> None:
        self.dense = dense
        self._before = dense if before is None else before
        self.k = k
        # The most candidates that are kept: with a guess far too low they would be the whole
        # vector.
        self.limit = 4 * k + CHUNK
        room = -(-min(CHUNK, dense.size) // 8) * 8
        self.below, self.above = np.empty((2, room), np.bool_)
        self.count = 0
        self.scans = 0

    def add(self, start: int, addend: Array) -> None:
        """Write a part of the vector: the old values plus an addend."""
        here = slice(start, start + addend.size)
        np.add(self._before[here], addend, out=self.dense[here])

    def scan_again(self, threshold: float) -> None:
        """Collect anew, from the dense vector's present values."""
        self.scan(((start, None) for start in _starts(self.dense)), threshold)

    def scan(self, chunks: Iterator[tuple[int, Array | None]], threshold: float) -> None:
        """Collect the nonzero entries not under the threshold, adding the addends first."""
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
        """Return the positions of a chunk's entries that are not under the threshold."""
        if np.isnan(self.threshold):  # k NaN were seen: only a NaN of more bits is larger
            return np.flatnonzero(keys(part) >= keys(self.threshold))
        # Two comparisons: |part| would be a third array to keep in cache. NaN passes neither.
        misses, size = self.below, -(-part.size // 8) * 8
        misses[part.size : size] = True
        np.less(part, self.threshold, out=misses[: part.size])
        misses[: part.size] &= np.greater(part, -self.threshold, out=self.above[: part.size])
        # Eight bools at a time: where hits are few, only words that hold one are looked into.
        words = np.flatnonzero(misses[:size].view(np.uint64) != _MISSES)
        # From an eighth of the words on it does not pay to look into them alone.
        if words.size > size >> 6:
            return np.flatnonzero(~misses[:size])
        inside = np.flatnonzero(~misses[:size].reshape(-1, 8)[words])
        return (words[inside >> 3] << 3) + (inside & 7)

    def _at_least(self, threshold: float) -> Any:
        """Return the threshold in the vector's dtype, above zero: zeros are no candidates."""
        smallest = np.nextafter(self.dense.dtype.type(0), self.dense.dtype.type(1))
        with np.errstate(over="ignore"):  # a threshold of another dtype may become infinity
            return max(self.dense.dtype.type(threshold), smallest)

    def _prune(self) -> None:
        """Keep the k largest so far; from here on only a larger |value| can displace one."""
        indices, values = self._gathered()
        ranks = keys(values)
        kept = largest(ranks, self.k)
        self.pieces = [(indices[kept], values[kept])]
        self.count = self.k
        # The next larger key; nothing is larger than the largest.
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
        """Return the value at the rank aimed at, extrapolated when fewer candidates were seen.

        0, no threshold, where that is not finite.
        """
        count, k = magnitudes.size, self.k
        rank = _aim(k)
        if rank <= count:
            following = float(np.partition(magnitudes, count - rank)[count - rank])
            return following if np.isfinite(following) else 0.0
        lowest = float(magnitudes.min())
        if not np.isfinite(lowest):
            return 0.0
        # All candidates were selected: there is no other to tell how values fall from rank k on.
        if count == k:
            return lowest / 2
        at_k = float(np.partition(magnitudes, count - k)[count - k])
        slope = (at_k - lowest) / (count - k)
        return max(lowest - slope * (rank - count), lowest / 2)


def largest(ranks: Array, k: int) -> Array:
    """Return a mask, bool [n], of the k largest keys; among equals those of lower position."""
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
    # What would be behind the last is compared with the first, which is smaller, so not equal.
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


# ---- the checksum of any bytes, by multiplications that every machine has
#
#     data      | block 0 | block 1 | ... | last, filled up with zeros |      4096 bytes each
#     block     sum of ((low_i + a_i) mod 2^32) * ((high_i + b_i) mod 2^32)   over its 64-bit words
#     in all    h = (h + block) * STEP for each block, from h = seed + bytes; then mixed; mod 2^64
#
# The sum is the NH of UMAC (Black et al. 1999, section 4), its keys a_i, b_i those of SplitMix64
# (Steele et al. 2014). Keys are public: a guard against accidents, not against adversaries. Of NH
# over random keys two texts collide with a chance of 2^-32 at most. So here: damage to one 32-bit
# half of a word is missed only where the other half is the negative of its key (one value in 2^32),
# damage all over a message with a chance of about 2^-64.

BLOCK_BYTES: Final = 4096
STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def mix(number: int) -> int:
    """Return the output function of SplitMix64: a bijection of 64 bits that spreads each bit."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


# Key i is of the i-th word: its low half for the word's low half, its high half for the high one.
_KEYS: Final = np.array(
    [mix((i + 1) * STEP & _MASK) for i in range(BLOCK_BYTES // 8)], np.uint64
).view(np.uint32)


def checksum(data: Array, seed: int = 0) -> int:
    """Return 64 bits for `data` (uint8 [n]); seed: the checksum of the bytes before it."""
    whole = data.size // BLOCK_BYTES * BLOCK_BYTES
    rest = data[whole:]
    filled = np.zeros(-(-rest.size // 8) * 8, np.uint8)
    filled[: rest.size] = rest
    blocks = _sums(data[:whole].view(np.uint32).reshape(-1, _KEYS.size)).tolist()
    if rest.size:
        blocks += _sums(filled.view(np.uint32).reshape(1, -1)).tolist()
    total = (seed + data.size) & _MASK
    for block in blocks:
        total = (total + block) * STEP & _MASK
    return mix(total)


def _sums(words: Array) -> Array:
    """Return the NH of each row of words, uint32 [blocks, 2 m]."""
    keyed = words + _KEYS[: words.shape[1]]
    products = keyed[:, ::2].astype(np.uint64) * keyed[:, 1::2]
    return products.sum(axis=1, dtype=np.uint64)
