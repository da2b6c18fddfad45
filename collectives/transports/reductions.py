"""Dense collectives made of send and receive: ceil(log2 P) rounds for any number of ranks P.

The array is P blocks, `bounds` their ends: block r, the one that rank r owns, is
array[bounds[r]:bounds[r+1]]. To gather, every rank passes all it holds to the rank `distance`
below, and the distance doubles (Bruck et al. 1997). To reduce, the same is run backwards: what was
copied is added, and the distance halves (Traeff 2023). Here rank 0 of 5; the other ranks do the
same, shifted by their rank:

    reduce   distance 4   sends block 4          to rank 4,   adds block 0          of rank 1
             distance 2   sends blocks 2 3       to rank 2,   adds blocks 0 1       of rank 3
             distance 1   sends block 1          to rank 1,   adds block 0          of rank 4
    gather   distance 1   sends block 0          to rank 4,   gets block 1          of rank 1
             distance 2   sends blocks 0 1       to rank 3,   gets blocks 2 3       of rank 2
             distance 4   sends block 0          to rank 1,   gets block 4          of rank 4

Either way each block but the own one is sent once: the fewest rounds and the fewest bytes there
can be. A block is reduced on its owner and copied from there, so that all ranks get the same bits.

A message of some length is followed by its checksum: what changes on the way ends the reduction.
(Where the transport checks all messages, it is at their end.)

A rank that got its message early would send the next one while its last is still in the host's
queue, and whatever of the last the queue has not taken yet comes behind. Who waits for that is
late, its next message, too, and so on around: a link idles while another has two messages to carry.
So the receiver of a long message says that it is here, and only then its sender sends the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from ..errors import MessageError
from ..kernels.narrow import narrow, widen
from ..vector import Array
from .endpoint import Endpoint
from .seal import checksum_of

REDUCTIONS: Final[dict[str, Callable[..., Array]]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
# From here on a message is long: it takes many times as long as the word that it has come.
LONG_BYTES: Final = 1 << 17
_WORD: Final = np.empty(0, np.uint8)
# Up to here a rank gets everyone's whole array in half the rounds: latency is all that counts.
_WHOLE_BYTES: Final = 4096
# From here on a checksum's own message takes no time that counts; below are votes and the like.
_CHECKED_BYTES: Final = 1 << 14


def travels_whole(array_bytes: int, size: int) -> bool:
    """Tell whether every rank gets all arrays of this size whole, and reduces them itself."""
    return array_bytes * (size - 1) <= _WHOLE_BYTES


def allreduce(endpoint: Endpoint, array: Array, reduction: str) -> None:
    """Reduce an array over the ranks in place; the same bits on every rank."""
    rank, size = endpoint.rank, endpoint.size
    if size == 1:
        return
    if travels_whole(array.nbytes, size):
        rows = np.empty((size, array.size), array.dtype)
        rows[rank] = array
        allgather_into(endpoint, rows.reshape(-1), [r * array.size for r in range(size + 1)])
        array[...] = _reduce_rows(rows, reduction)
        return
    bounds = even_bounds(array.size, size)
    reduce_scatter(endpoint, array, bounds, reduction)
    allgather_into(endpoint, array, bounds)


def _reduce_rows(rows: Array, reduction: str) -> Array:
    """Reduce one row after the other, in place: an order that no CPU's vector width changes."""
    total, *others = widen(rows)
    for row in others:
        REDUCTIONS[reduction](total, row, out=total)
    return narrow(total, rows.dtype)


def even_bounds(length: int, size: int) -> Sequence[int]:
    """Return the bounds of blocks that differ by one element at most."""
    return [length * rank // size for rank in range(size + 1)]


def reduce_scatter(endpoint: Endpoint, array: Array, bounds: Sequence[int], reduction: str) -> None:
    """Reduce this rank's block in place; the other blocks are left with partial results."""
    rank, size = endpoint.rank, endpoint.size
    combine = REDUCTIONS[reduction]
    for distance in reversed(_distances(size)):
        blocks = min(distance, size - distance)
        to, source = (rank + distance) % size, (rank - distance) % size
        message = _joined(_parts(array, bounds, to, blocks))
        parts = _parts(array, bounds, rank, blocks)
        for mine, theirs in _shifted(endpoint, message, to, source, parts):
            mine[...] = narrow(combine(widen(mine), widen(theirs)), array.dtype)


def allgather_into(endpoint: Endpoint, array: Array, bounds: Sequence[int]) -> None:
    """Fill the blocks that the other ranks own with theirs."""
    rank, size = endpoint.rank, endpoint.size
    for distance in _distances(size):
        blocks = min(distance, size - distance)
        to, source = (rank - distance) % size, (rank + distance) % size
        message = _joined(_parts(array, bounds, rank, blocks))
        parts = _parts(array, bounds, source, blocks)
        for mine, theirs in _shifted(endpoint, message, to, source, parts):
            mine[...] = theirs


def _distances(size: int) -> list[int]:
    return [1 << j for j in range((size - 1).bit_length())]


def _parts(array: Array, bounds: Sequence[int], first: int, blocks: int) -> list[Array]:
    """Return so many blocks from the first one on: one slice, or two where they wrap around."""
    size = len(bounds) - 1
    last = first + blocks
    if last <= size:
        return [array[bounds[first] : bounds[last]]]
    return [array[bounds[first] : bounds[size]], array[bounds[0] : bounds[last - size]]]


def _joined(parts: list[Array]) -> Array:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.ascontiguousarray(whole).view(np.uint8)


def _shifted(
    endpoint: Endpoint, message: Array, to: int, source: int, parts: list[Array]
) -> Iterator[tuple[Array, Array]]:
    """Send a message, and yield each part of the array with its share of the one that comes."""

    def is_checked(message: Array) -> bool:
        return message.size >= _CHECKED_BYTES and not endpoint.checks_messages

    sent = [endpoint.send(message, to)]
    if is_checked(message):
        sent.append(endpoint.send(checksum_of(message), to))
    theirs = endpoint.receive(source)
    if theirs.size >= LONG_BYTES:
        sent.append(endpoint.send(_WORD, source))
    shares = _shares(endpoint, source, theirs, parts)
    if is_checked(theirs) and endpoint.receive(source).tobytes() != checksum_of(theirs).tobytes():
        raise MessageError(
            f"the message from rank {endpoint.ranks[source]} is malformed: a part of a dense "
            "collective does not match its checksum; start again from the last checkpoint"
        )
    yield from shares
    for is_gone in sent:
        is_gone()
    if message.size >= LONG_BYTES:
        endpoint.receive(to)


def _shares(
    endpoint: Endpoint, source: int, message: Array, parts: list[Array]
) -> list[tuple[Array, Array]]:
    """Return each part with its share of a message; raise MessageError where they do not fit."""
    expected = sum(part.nbytes for part in parts)
    if message.size != expected:
        raise MessageError(
            f"the message from rank {endpoint.ranks[source]} is malformed: a part of a dense "
            f"collective has {message.size} bytes where rank {endpoint.ranks[endpoint.rank]}'s "
            f"has {expected}; every rank must pass an array of one size and dtype"
        )
    theirs = message.view(parts[0].dtype)
    pairs, start = [], 0
    for part in parts:
        pairs.append((part, theirs[start : start + part.size]))
        start += part.size
    return pairs
