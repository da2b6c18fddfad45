"""Adasum: combine dense vectors, averaging parallel components and adding orthogonal ones.

    a (+) b  =  a (1 - a.b / 2|a|^2)  +  b (1 - a.b / 2|b|^2)

Orthogonal vectors add, equal ones stay as they are (Maleki et al. 2021, section 3). Ranks are
combined pairwise, in a tree: first those beyond the largest power of two with the first ranks, then
neighbours.

    P = 6     ((0 (+) 4) (+) (1 (+) 5))  (+)  (2 (+) 3)

This is a recursive halving: in each round the distance doubles, and both ranks of a pair keep half
of what they had. As no rank then holds whole vectors, the dot products are summed over all ranks
that share the two vectors. With the vector in quarters:

    P = 4            rank 0     rank 1     rank 2     rank 3
                     1234       1234       1234       1234      its own
    distance 1       12         34         12         34        of 0 (+) 1, of 2 (+) 3
    distance 2       1          3          2          4         of all
    back the same way: 2, then 1                                all of it

If P is a power of two, a rank sends 2 (P-1)/P vectors. Otherwise that holds for the largest power
of two below P; each rank beyond it sends its vector once, and its partner sends the result once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ..errors import MessageError
from ..kernels.narrow import BFLOAT16, narrow, widen
from ..transports.reductions import distances
from ..transports.transport import Transport
from ..vector import Array

_DTYPES: Final = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
_BLOCK: Final = 1 << 15  # elements that are widened at a time, to stay in the cache


def allreduce(transport: Transport, array: Array, segments: Sequence[int] | None = None) -> None:
    """Combine an array, [n], over the ranks in place; the same bits on every rank.

    segments: lengths that add up to n, equal on all ranks. Each segment is combined by itself, as
              in a call of its own; None: the whole array is one.

    Dot products and sums are computed in float64, and the result of each pair is rounded once to
    the array's dtype. With several ranks, NaN or infinity on any of them makes the whole segment
    NaN, as do float64 values whose squares overflow. Raises ValueError for another dtype, or
    segments that do not add up; MessageError if a peer's array is of another size or dtype.
    """
    group = _Group(transport, _checked_bounds(array, segments))
    with (
        transport.operation("an allreduce by Adasum"),
        np.errstate(over="ignore", invalid="ignore"),  # non-finite values are passed on
    ):
        paired = 1 << (transport.size.bit_length() - 1)
        if transport.rank >= paired:
            host = transport.rank - paired
            # Wait for the send: the result overwrites the memory that is sent.
            transport.send(_bytes(array), host)()
            array[...] = group.receive(host, array)
            return
        guest = transport.rank + paired
        if guest < transport.size:
            # This rank has both vectors whole, and shares their dot products with nobody.
            group.combine(0, array, group.receive(guest, array), out=array, holders=1)
        group.allreduce(array, paired)
        if guest < transport.size:
            transport.send(_bytes(array), guest)()


def _checked_bounds(array: Array, segments: Sequence[int] | None) -> list[int]:
    """Return 0 and the segments' ends; raise ValueError for an array that cannot be combined."""
    if array.dtype not in _DTYPES:
        raise ValueError(f"Adasum is for 16-bit floats, float32 and float64, got {array.dtype}")
    lengths = [array.size] if segments is None else segments
    least = min(lengths, default=0)
    # The sum alone would let a negative length pass.
    if least < 0 or sum(lengths) != array.size:
        raise ValueError(
            f"segments must be lengths that add up to {array.size} (the array's), got "
            f"{len(lengths)} that add up to {sum(lengths)}, the least of them {least}"
        )
    return list(itertools.accumulate(lengths, initial=0))


class _Group:
    """Combines vectors with these segments over the ranks of a transport."""

    def __init__(self, transport: Transport, bounds: Sequence[int]) -> None:
        self._transport = transport
        self._bounds = bounds

    def allreduce(self, array: Array, paired: int) -> None:
        """Combine the arrays of the first `paired` ranks, a power of two, in place."""
        kept = slice(0, array.size)
        halvings = []
        for distance in distances(paired):
            peer = self._transport.rank ^ distance
            middle = (kept.start + kept.stop) // 2
            lower, upper = slice(kept.start, middle), slice(middle, kept.stop)
            kept, sent = (lower, upper) if self._transport.rank < peer else (upper, lower)
            own, received = array[kept], self.swap(array[sent], peer, array[kept])
            # On all holders `a` must be the lower rank's: the products are summed by column.
            a, b = (own, received) if self._transport.rank < peer else (received, own)
            self.combine(kept.start, a, b, out=own, holders=2 * distance)
            halvings.append((peer, kept, sent))
        for peer, kept, sent in reversed(halvings):
            array[sent] = self.swap(array[kept], peer, array[sent])

    def combine(self, start: int, a: Array, b: Array, out: Array, holders: int) -> None:
        """Set `out` to a (+) b, for this rank's part of both vectors, from element `start` on.

        holders: how many consecutive ranks share the two vectors, and all call this.
        """
        products = np.zeros((len(self._bounds) - 1, 3))
        for segment, block in self._blocks(start, a.size):
            x, y = _wide(a[block]), _wide(b[block])
            products[segment] += x @ y, x @ x, y @ y
        for distance in distances(holders):
            # Addition commutes, so all holders get the same bits.
            products += self.swap(products, self._transport.rank ^ distance, products)
        dots, squares = products[:, :1], products[:, 1:]
        # A zero vector's factor is 1: its dot product is 0.
        shares = np.divide(dots, 2 * squares, out=np.zeros_like(squares), where=squares != 0)
        for segment, block in self._blocks(start, a.size):
            factor_a, factor_b = 1 - shares[segment]
            x, y = _wide(a[block]), _wide(b[block])
            out[block] = narrow(x * factor_a + y * factor_b, out.dtype)

    def _blocks(self, start: int, length: int) -> Iterator[tuple[int, slice]]:
        """Yield the blocks of a part that begins at element `start`, each with its segment."""
        # The last segment that begins at `start` or before: this skips empty ones.
        first = bisect.bisect_right(self._bounds, start) - 1
        for segment, (low, high) in enumerate(itertools.pairwise(self._bounds[first:]), first):
            if low >= start + length:
                return
            end = min(high - start, length)
            for begin in range(max(low - start, 0), end, _BLOCK):
                yield segment, slice(begin, min(begin + _BLOCK, end))

    def swap(self, part: Array, peer: int, like: Array) -> Array:
        """Swap parts with a peer; the peer's must have the size and dtype of `like`."""
        return self._elements(self._transport.exchange(_bytes(part), peer), peer, like)

    def receive(self, peer: int, like: Array) -> Array:
        """Return a peer's array, which must have the size and dtype of `like`."""
        return self._elements(self._transport.receive(peer), peer, like)

    def _elements(self, message: Array, sender: int, like: Array) -> Array:
        if message.size != like.nbytes:
            ranks = self._transport.ranks
            raise MessageError(
                f"the message from rank {ranks[sender]} is malformed: a part of a vector for "
                f"Adasum has {message.size} bytes where rank {ranks[self._transport.rank]} expects "
                f"{like.nbytes}; every rank must pass an array of one size and dtype, and the same "
                "segments"
            )
        return message.view(like.dtype).reshape(like.shape)


def _wide(array: Array) -> Array:
    return widen(array).astype(np.float64)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
