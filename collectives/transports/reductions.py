"""Dense collectives made of send and receive: ceil(log2 P) rounds for any number of ranks P.

The array is cut into P blocks at `bounds`: rank r owns block r, array[bounds[r]:bounds[r+1]]. To
gather, every rank passes all it holds to the rank `distance` below, and the distance doubles (Bruck
et al. 1997). To reduce, the same steps run backwards: add instead of copy, and the distance halves
(Traeff 2023). The table shows rank 0 of 5; the other ranks do the same, shifted by their rank:

    reduce   distance 4   sends block 4          to rank 4,   adds block 0          of rank 1
             distance 2   sends blocks 2 3       to rank 2,   adds blocks 0 1       of rank 3
             distance 1   sends block 1          to rank 1,   adds block 0          of rank 4
    gather   distance 1   sends block 0          to rank 4,   gets block 1          of rank 1
             distance 2   sends blocks 0 1       to rank 3,   gets blocks 2 3       of rank 2
             distance 4   sends block 0          to rank 1,   gets block 4          of rank 4

Either way a rank sends each block but its own once: the fewest possible rounds and bytes. A block
is reduced on its owner and copied from there, so all ranks get the same bits.

From 16 KiB on, a checksum follows each message: corruption on the way ends the reduction. (If the
transport checks all messages, they end with their checksum.)

Suppose a rank receives its message early and sends the next one while its last is still partly in
the host's queue. The rest of the last then queues behind the next, its receiver is late, and so are
that rank's next messages: some links idle while others carry two messages. So the receiver of a
long message confirms it, and only then does its sender send the next.
Messages of many megabytes would delay each other: they are sent in pieces, each of them confirmed,
and the next piece is sent once the previous one has arrived. A round waits for one latency, or two
with long messages, for any number of pieces.
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
# The names in MPI and NCCL.
LIBRARY_NAMES: Final = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}
# Messages from this size on are long: they take many times as long as their confirmation.
LONG_BYTES: Final = 1 << 17
_CONFIRMATION: Final = np.empty(0, np.uint8)
# Two longer messages delay each other: on two hosts with 100 Mbit/s, the time above the link's own
# grew from a tenth to two fifths.
PIECE_BYTES: Final = 4 << 20
# Up to this size every rank gets all whole arrays in half the rounds, as only latency counts.
_WHOLE_BYTES: Final = 4096
# From this size on the time of a checksum's own message is negligible; smaller arrays are flags.
CHECKED_BYTES: Final = 1 << 14
CHECKSUM_BYTES: Final = 8


class Endpoint(ABC):
    """The ranks, seen from one of them.

    rank, size: this rank's number among them, and their count.
    ranks:      their world ranks, for errors.
    """

    rank: int
    size: int
    ranks: Sequence[int]

    @property
    def checks_messages(self) -> bool:
        """Whether every message includes a checksum; the same on all ranks."""
        return False

    @abstractmethod
    def send(self, message: Array, to: int) -> Callable[[], None]:
        """Begin to send uint8 [m] to a rank; return a function that waits until it is sent.

        The message must stay unchanged until then.
        """

    @abstractmethod
    def receive(self, source: int) -> Array:
        """Return a rank's next message, uint8 [m], in newly allocated memory.

        Raises PeerError if that rank has left, PeerTimeoutError if it stays silent.
        """


def checksum_of(message: Array) -> Array:
    """Return the checksum of uint8 [m], uint8 [8]."""
    return np.frombuffer(kernels.checksum(message).to_bytes(CHECKSUM_BYTES, "little"), np.uint8)


def require_checksum(message: Array, checksum: Array, sender: int) -> None:
    """Raise MessageError, naming the sender, if a message has changed on the way."""
    if checksum.tobytes() != checksum_of(message).tobytes():
        raise MessageError(
            f"the message from rank {sender} is malformed: its {message.size + checksum.size} "
            "bytes do not match their checksum; start again from the last checkpoint"
        )


def append_checksum(message: Array) -> Array:
    """Return a copy of uint8 [m] with its checksum appended, uint8 [m + 8]."""
    checked = np.empty(message.size + CHECKSUM_BYTES, np.uint8)
    checked[:-CHECKSUM_BYTES] = message
    # Over the copy: another thread or rank may write to shared memory that is being sent.
    checked[-CHECKSUM_BYTES:] = checksum_of(checked[:-CHECKSUM_BYTES])
    return checked


def strip_checksum(checked: Array, sender: int) -> Array:
    """Return the message without its checksum; raise MessageError, naming the sender, if wrong."""
    message, checksum = checked[:-CHECKSUM_BYTES], checked[-CHECKSUM_BYTES:]
    require_checksum(message, checksum, sender)
    return message


def loses_nan(reduction: str, dtype: str) -> bool:
    """Tell whether a library's own reduction may lose a NaN, as in MPI, gloo and NCCL.

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
    """Reduce one row after another, in place, so that vector width does not change the order."""
    total, *others = widen(rows)
    for row in others:
        REDUCTIONS[reduction](total, row, out=total)
    return narrow(total, rows.dtype)


def even_bounds(length: int, size: int) -> Sequence[int]:
    """Return the bounds of blocks whose lengths differ by at most one element."""
    return [length * rank // size for rank in range(size + 1)]


def parts_of(bounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each owner with the begin and end of its block, except for empty blocks."""
    ends = enumerate(itertools.pairwise(bounds))
    return [(owner, begin, end) for owner, (begin, end) in ends if end > begin]


def reduce_scatter(endpoint: Endpoint, array: Array, bounds: Sequence[int], reduction: str) -> None:
    """Reduce this rank's block in place; the other blocks hold partial results afterwards."""
    rank, size = endpoint.rank, endpoint.size
    for distance in reversed(distances(size)):
        blocks = min(distance, size - distance)
        to, source = (rank + distance) % size, (rank - distance) % size
        sent = _pieces(array, bounds, to, blocks)
        own = _pieces(array, bounds, rank, blocks)
        for block, received in _exchange_shifted(endpoint, sent, to, source, own):
            if is_narrow(array.dtype):
                combine(block, received, reduction)
            else:
                REDUCTIONS[reduction](block, received, out=block)


def allgather_into(endpoint: Endpoint, array: Array, bounds: Sequence[int]) -> None:
    """Fill the other ranks' blocks with theirs."""
    rank, size = endpoint.rank, endpoint.size
    for distance in distances(size):
        blocks = min(distance, size - distance)
        to, source = (rank - distance) % size, (rank + distance) % size
        sent = _pieces(array, bounds, rank, blocks)
        expected = _pieces(array, bounds, source, blocks)
        for block, received in _exchange_shifted(endpoint, sent, to, source, expected):
            block[...] = received


def allgather(endpoint: Endpoint, message: Array) -> list[Array]:
    """Return every rank's message, in rank order; each rank packs all that it holds into one."""
    messages = [message]  # from ranks endpoint.rank, endpoint.rank + 1, ...
    distance = 1
    while distance < endpoint.size:
        count = min(distance, endpoint.size - distance)
        # Wait for the send only after the receive, as the receiving rank also sends before it
        # receives.
        sent = endpoint.send(_pack(messages[:count]), (endpoint.rank - distance) % endpoint.size)
        source = (endpoint.rank + distance) % endpoint.size
        messages += _unpack(endpoint.receive(source), count, endpoint.ranks[source])
        sent()
        distance *= 2
    return [messages[(rank - endpoint.rank) % endpoint.size] for rank in range(endpoint.size)]


def _pack(messages: list[Array]) -> Array:
    """Return the messages packed into one: their count, their sizes, their bytes."""
    head = struct.pack(f"<q{len(messages)}q", len(messages), *(m.size for m in messages))
    return np.concatenate([np.frombuffer(head, np.uint8), *messages])


def _unpack(packed: Array, count: int, sender: int) -> list[Array]:
    """Return the `count` messages that a rank packed; raise MessageError if they are malformed."""
    head = struct.Struct(f"<{1 + count}q")
    if packed.size >= head.size:
        packed_count, *sizes = head.unpack_from(packed.data)
        if packed_count == count and min(sizes) >= 0 and head.size + sum(sizes) == packed.size:
            ends = itertools.accumulate(sizes, initial=head.size)
            return [packed[a:b] for a, b in itertools.pairwise(ends)]
    raise MessageError(
        f"the message from rank {sender} is malformed: its {packed.size} bytes are not "
        f"{count} packed messages of an allgather"
    )


def distances(size: int) -> list[int]:
    """Return 1, 2, 4, ... below the number of ranks: the distance of messages in each round."""
    return [1 << j for j in range((size - 1).bit_length())]


def _pieces(array: Array, bounds: Sequence[int], first: int, blocks: int) -> list[list[Array]]:
    """Return `blocks` blocks from `first` on, in pieces of one slice, or two at the wrap-around.

    The list has at least one piece, which may be empty.
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
    # Send a single slice without a copy: no block is overwritten while it is being sent.
    whole = slices[0] if len(slices) == 1 else np.concatenate(slices)
    return np.ascontiguousarray(whole).view(np.uint8)


def _exchange_shifted(
    endpoint: Endpoint, own: list[list[Array]], to: int, source: int, expected: list[list[Array]]
) -> Iterator[tuple[Array, Array]]:
    """Send our pieces; yield each wanted slice with its share of a received piece.

    Two ranks that swap use one stream: each receives in the order in which the other sends: pieces
    0 and 1, the confirmation of 0, piece 2, the confirmation of 1, piece 3, and so on.
    """
    sent: list[Callable[[], None]] = []

    def send(number: int) -> None:
        if number < len(own):
            message = _joined(own[number])
            sent.append(endpoint.send(message, to))
            if _is_checked(endpoint, message.size):
                sent.append(endpoint.send(checksum_of(message), to))

    def wait_for_confirmation(number: int) -> None:
        if number < len(own) and _bytes(own[number]) >= LONG_BYTES:
            endpoint.receive(to)

    last = max(len(own), len(expected)) - 1
    send(0)
    send(1)
    for number in range(last + 1):
        slices = expected[number] if number < len(expected) else []
        received = _receive(endpoint, source, slices) if slices else None
        if number > 0:
            wait_for_confirmation(number - 1)
        if _bytes(slices) >= LONG_BYTES:
            sent.append(endpoint.send(_CONFIRMATION, source))
        # Before using the piece, so that the link does not idle meanwhile. A round never writes to
        # the blocks that it sends.
        send(number + 2)
        if received is not None:
            yield from _split_by_slice(received, slices, endpoint.ranks[source])
    for wait_until_sent in sent:
        wait_until_sent()
    # Otherwise the next round's message could queue behind this round's last piece.
    wait_for_confirmation(last)


def _bytes(slices: list[Array]) -> int:
    return sum(part.nbytes for part in slices)


def _is_checked(endpoint: Endpoint, size_bytes: int) -> bool:
    return size_bytes >= CHECKED_BYTES and not endpoint.checks_messages


def _receive(endpoint: Endpoint, source: int, slices: list[Array]) -> tuple[Array, Array | None]:
    """Return the piece for these slices, and its checksum if one follows.

    Raises MessageError for a piece of another size, before waiting for anything else.
    """
    message = endpoint.receive(source)
    if message.size != _bytes(slices):
        raise MessageError(
            f"the message from rank {endpoint.ranks[source]} is malformed: a part of a dense "
            f"collective has {message.size} bytes, but rank {endpoint.ranks[endpoint.rank]}'s "
            f"has {_bytes(slices)}; every rank must pass an array of one size and dtype"
        )
    is_checked = _is_checked(endpoint, message.size)
    return message, endpoint.receive(source) if is_checked else None


def _split_by_slice(
    received: tuple[Array, Array | None], slices: list[Array], sender: int
) -> Iterator[tuple[Array, Array]]:
    """Yield each slice with its share of a message; raise MessageError if the message changed."""
    message, checksum = received
    if checksum is not None:
        require_checksum(message, checksum, sender)
    elements = message.view(slices[0].dtype)
    start = 0
    for part in slices:
        yield part, elements[start : start + part.size]
        start += part.size
