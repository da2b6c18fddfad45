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

A message from 16 KiB on is followed by its checksum: a change on the way ends the reduction. (Where
the transport checks all messages, the checksum is at their end.)

A rank that received its message early would send the next one while its last is still partly
outside the host's queue, and the rest of the last would queue behind the next. Its receiver would
be late, and so would that rank's next message, and so on: links idle while others carry two
messages. So the receiver of a long message confirms it, and only then its sender sends the next.
Messages of many megabytes would delay each other: they are sent in pieces, each of them confirmed,
and the next piece is sent when the one before the last has come. A round waits for one latency, or
two with long messages, for any number of pieces.
"""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from .. import kernels
from ..errors import MessageError
from ..kernels.narrow import combine, is_narrow, narrow, widen
from ..vector import Array

REDUCTIONS: Final[dict[str, Callable[..., Array]]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
# What MPI and NCCL call them.
LIBRARY_NAMES: Final = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}
# From here on a message is long: it takes many times as long as its confirmation.
LONG_BYTES: Final = 1 << 17
_WORD: Final = np.empty(0, np.uint8)
# Two longer messages delay each other: on two hosts with 100 Mbit/s the time above the link's own
# grew from a tenth to two fifths.
PIECE_BYTES: Final = 4 << 20
# Up to here a rank gets everyone's whole array in half the rounds: latency is all that counts.
_WHOLE_BYTES: Final = 4096
# From here on the time of a checksum's own message is negligible; smaller arrays are flags.
CHECKED_BYTES: Final = 1 << 14
CHECKSUM_BYTES: Final = 8


class Endpoint(ABC):
    """The ranks, seen from one of them.

    rank, size: this rank's number among them, and how many there are.
    ranks:      their numbers in the world, which errors name.
    """

    rank: int
    size: int
    ranks: Sequence[int]

    @property
    def checks_messages(self) -> bool:
        """Whether every message travels with its checksum; the same on all ranks."""
        return False

    @abstractmethod
    def send(self, message: Array, to: int) -> Callable[[], None]:
        """Begin to send uint8 [m] to a rank; return the function that waits until it is gone.

        The message must stay unchanged until then.
        """

    @abstractmethod
    def receive(self, source: int) -> Array:
        """Return the next message of a rank, uint8 [m], in memory of its own.

        Raises PeerError when that rank left, PeerTimeoutError when it stays silent.
        """


def checksum_of(message: Array) -> Array:
    """Return the checksum of uint8 [m], uint8 [8]."""
    return np.frombuffer(kernels.checksum(message).to_bytes(CHECKSUM_BYTES, "little"), np.uint8)


def require_checksum(message: Array, checksum: Array, sender: int) -> None:
    """Raise MessageError, which names the sender, where a message has changed on the way."""
    if checksum.tobytes() != checksum_of(message).tobytes():
        raise MessageError(
            f"the message from rank {sender} is malformed: its {message.size + checksum.size} "
            "bytes do not match their checksum; start again from the last checkpoint"
        )


def append_checksum(message: Array) -> Array:
    """Return a copy of uint8 [m] with its checksum behind it, uint8 [m + 8]."""
    checked = np.empty(message.size + CHECKSUM_BYTES, np.uint8)
    checked[:-CHECKSUM_BYTES] = message
    # Of the copy: another thread or rank may write to shared memory that is sent.
    checked[-CHECKSUM_BYTES:] = checksum_of(checked[:-CHECKSUM_BYTES])
    return checked


def strip_checksum(checked: Array, sender: int) -> Array:
    """Return the message before its checksum; raise MessageError, which names the sender."""
    message, checksum = checked[:-CHECKSUM_BYTES], checked[-CHECKSUM_BYTES:]
    require_checksum(message, checksum, sender)
    return message


def loses_nan(reduction: str, dtype: str) -> bool:
    """Tell whether a library's own reduction may lose a NaN, as MPI's, gloo's and NCCL's may.

    Their min and max compare, and a NaN is neither less nor more than a number; NumPy's keep it.
    dtype: its name in NumPy, or bfloat16.
    """
    return reduction in ("min", "max") and "float" in dtype


def is_gathered_whole(array_bytes: int, size: int) -> bool:
    """Tell whether every rank gets all whole arrays of this size, and reduces them itself."""
    return array_bytes * (size - 1) <= _WHOLE_BYTES


def allreduce(endpoint: Endpoint, array: Array, reduction: str) -> None:
    """Reduce an array over the ranks in place; the same bits on every rank."""
    rank, size = endpoint.rank, endpoint.size
    if size == 1:
        return
    if is_gathered_whole(array.nbytes, size):
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


def parts_of(bounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each owner with the begin and end of its block, where that is not empty."""
    ends = enumerate(itertools.pairwise(bounds))
    return [(owner, begin, end) for owner, (begin, end) in ends if end > begin]


def reduce_scatter(endpoint: Endpoint, array: Array, bounds: Sequence[int], reduction: str) -> None:
    """Reduce this rank's block in place; the other blocks are left with partial results."""
    rank, size = endpoint.rank, endpoint.size
    for distance in reversed(distances(size)):
        blocks = min(distance, size - distance)
        to, source = (rank + distance) % size, (rank - distance) % size
        theirs = _pieces(array, bounds, to, blocks)
        ours = _pieces(array, bounds, rank, blocks)
        for here, come in _shifted(endpoint, theirs, to, source, ours):
            if is_narrow(array.dtype):
                combine(here, come, reduction)
            else:
                REDUCTIONS[reduction](here, come, out=here)


def allgather_into(endpoint: Endpoint, array: Array, bounds: Sequence[int]) -> None:
    """Fill the blocks that the other ranks own with theirs."""
    rank, size = endpoint.rank, endpoint.size
    for distance in distances(size):
        blocks = min(distance, size - distance)
        to, source = (rank - distance) % size, (rank + distance) % size
        held = _pieces(array, bounds, rank, blocks)
        wanted = _pieces(array, bounds, source, blocks)
        for here, come in _shifted(endpoint, held, to, source, wanted):
            here[...] = come


def allgather(endpoint: Endpoint, message: Array) -> list[Array]:
    """Return every rank's message, in rank order: each rank packs all that it holds as one."""
    held = [message]  # of ranks endpoint.rank, endpoint.rank + 1, ...
    distance = 1
    while distance < endpoint.size:
        wanted = min(distance, endpoint.size - distance)
        # Waited for only after the receive: each rank sends to one that sends before it receives,
        # too.
        sent = endpoint.send(_pack(held[:wanted]), (endpoint.rank - distance) % endpoint.size)
        source = (endpoint.rank + distance) % endpoint.size
        held += _unpack(endpoint.receive(source), wanted, endpoint.ranks[source])
        sent()
        distance *= 2
    return [held[(rank - endpoint.rank) % endpoint.size] for rank in range(endpoint.size)]


def _pack(messages: list[Array]) -> Array:
    """Return the messages as one: their count, their sizes, their bytes."""
    head = struct.pack(f"<q{len(messages)}q", len(messages), *(m.size for m in messages))
    return np.concatenate([np.frombuffer(head, np.uint8), *messages])


def _unpack(packed: Array, count: int, sender: int) -> list[Array]:
    """Return the `count` messages in what a rank packed; raise MessageError if it is not that."""
    head = struct.Struct(f"<{1 + count}q")
    if packed.size >= head.size:
        packed_count, *sizes = head.unpack_from(packed.data)
        if packed_count == count and min(sizes) >= 0 and head.size + sum(sizes) == packed.size:
            ends = itertools.accumulate(sizes, initial=head.size)
            return [packed[a:b] for a, b in itertools.pairwise(ends)]
    raise MessageError(
        f"the message from rank {sender} is malformed: its {packed.size} bytes are not "
        f"{count} messages of an allgather"
    )


def distances(size: int) -> list[int]:
    """Return 1, 2, 4, ... below the number of ranks: how far messages go, round by round."""
    return [1 << j for j in range((size - 1).bit_length())]


def _pieces(array: Array, bounds: Sequence[int], first: int, blocks: int) -> list[list[Array]]:
    """Return `blocks` blocks from `first` on, in pieces: of one slice, or two around the end.

    There is at least one piece, which may be empty.
    """
    size, length = len(bounds) - 1, bounds[-1] - bounds[0]
    last = first + blocks
    begin = bounds[first]
    end = bounds[last] if last <= size else length + bounds[last - size]
    step = max(1, PIECE_BYTES // array.itemsize)
    starts = range(begin, end, step) or [begin]
    return [_ring_slices(array, bounds, start, min(start + step, end)) for start in starts]


def _ring_slices(array: Array, bounds: Sequence[int], begin: int, end: int) -> list[Array]:
    """Return the slices from begin to end, where the first block follows the last one."""
    first, last = bounds[0], bounds[-1]
    length = last - first
    if begin >= last:
        return [array[begin - length : end - length]]
    if end <= last:
        return [array[begin:end]]
    return [array[begin:last], array[first : end - length]]


def _joined(slices: list[Array]) -> Array:
    # One slice is sent from where it lies: no block that is sent is written before it is gone.
    whole = slices[0] if len(slices) == 1 else np.concatenate(slices)
    return np.ascontiguousarray(whole).view(np.uint8)


def _shifted(
    endpoint: Endpoint, ours: list[list[Array]], to: int, source: int, wanted: list[list[Array]]
) -> Iterator[tuple[Array, Array]]:
    """Send our pieces, and yield each slice that is wanted with its share of a piece that comes.

    Two ranks that swap use one stream: each receives in the order in which the other sends, pieces
    0 and 1, the confirmation of 0, piece 2, the confirmation of 1, piece 3, and so on.
    """
    sent: list[Callable[[], None]] = []

    def send(number: int) -> None:
        if number < len(ours):
            message = _joined(ours[number])
            sent.append(endpoint.send(message, to))
            if _is_checked(endpoint, message.size):
                sent.append(endpoint.send(checksum_of(message), to))

    def wait_for_go_ahead(number: int) -> None:
        if number < len(ours) and _bytes(ours[number]) >= LONG_BYTES:
            endpoint.receive(to)

    last = max(len(ours), len(wanted)) - 1
    send(0)
    send(1)
    for number in range(last + 1):
        slices = wanted[number] if number < len(wanted) else []
        come = _receive(endpoint, source, slices) if slices else None
        if number > 0:
            wait_for_go_ahead(number - 1)
        if _bytes(slices) >= LONG_BYTES:
            sent.append(endpoint.send(_WORD, source))
        # Before the piece is used, so that the link is not idle meanwhile. The blocks of a round
        # that are sent are none of those that are written.
        send(number + 2)
        if come is not None:
            yield from _shares(come, slices, endpoint.ranks[source])
    for is_gone in sent:
        is_gone()
    # Else the next round's message could queue behind the last piece of this one.
    wait_for_go_ahead(last)


def _bytes(slices: list[Array]) -> int:
    return sum(part.nbytes for part in slices)


def _is_checked(endpoint: Endpoint, size_bytes: int) -> bool:
    return size_bytes >= CHECKED_BYTES and not endpoint.checks_messages


def _receive(endpoint: Endpoint, source: int, slices: list[Array]) -> tuple[Array, Array | None]:
    """Return the piece for these slices, and the checksum that follows it if one does.

    Raises MessageError for a piece of another size, before anything else is waited for.
    """
    message = endpoint.receive(source)
    if message.size != _bytes(slices):
        raise MessageError(
            f"the message from rank {endpoint.ranks[source]} is malformed: a part of a dense "
            f"collective has {message.size} bytes where rank {endpoint.ranks[endpoint.rank]}'s "
            f"has {_bytes(slices)}; every rank must pass an array of one size and dtype"
        )
    is_checked = _is_checked(endpoint, message.size)
    return message, endpoint.receive(source) if is_checked else None


def _shares(
    come: tuple[Array, Array | None], slices: list[Array], sender: int
) -> Iterator[tuple[Array, Array]]:
    """Yield each slice with its share of a message; raise MessageError where it has changed."""
    message, checksum = come
    if checksum is not None:
        require_checksum(message, checksum, sender)
    theirs = message.view(slices[0].dtype)
    start = 0
    for part in slices:
        yield part, theirs[start : start + part.size]
        start += part.size
