"""Transport: what an algorithm may ask of the ranks' connection.

A transport implements `send`, `receive` and the few facts below; everything else is built here
from those two, so that every transport counts what it sends and no wait lasts for ever. One
thread uses a transport at a time, and every rank calls the same operations in the same order.
"""

from __future__ import annotations

import itertools
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ..errors import MessageError
from ..vector import Array

STALL_WARNING_SECONDS: Final = 60.0  # how often a rank that waits says so


def say(text: str) -> None:
    """Print a line on stderr, in one write: lines of several ranks share it."""
    print(f"gtopk: {text}\n", end="", file=sys.stderr, flush=True)


REDUCTIONS: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass
class Traffic:
    """What this rank sent, and how long it waited, since the counters were read last.

    wait_seconds: for messages to come or go, and inside an allreduce of the library's own.
    """

    sent_bytes: int = 0
    sent_messages: int = 0
    wait_seconds: float = field(default=0.0, compare=False)

    def take(self) -> Traffic:
        """Return the counters and set them to zero."""
        taken = Traffic(self.sent_bytes, self.sent_messages, self.wait_seconds)
        self.sent_bytes = self.sent_messages = 0
        self.wait_seconds = 0.0
        return taken


class Transport(ABC):
    """The connection between `size` ranks, seen from one of them.

    traffic: counts every message given to `send`; see `allreduce` for the one exception.
    counts_allreduce: whether `allreduce` is counted message by message, or by formula.
    """

    name: str
    rank: int
    size: int
    counts_allreduce = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self._activity = "an exchange"
        self._begun = 0
        self._completed = 0
        self._left: dict[int, tuple[int, str]] = {}  # rank -> operations completed, reason

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

    @abstractmethod
    def resign(self, reason: str) -> None:
        """Tell every peer that this rank takes part no more; whoever waits for it gets an error.

        Returns at once; only the first reason counts.
        """

    @abstractmethod
    def collect_resignations(self) -> None:
        """Note in `_left` who has resigned since the last look."""

    @abstractmethod
    def abort(self, exit_code: int) -> None:
        """End the whole job now, every rank of it."""

    @abstractmethod
    def neighbours(self) -> list[int]:
        """Return the ranks on this rank's host, itself included, in order."""

    @abstractmethod
    def library(self) -> str:
        """Return name and version of what carries the messages."""

    @contextmanager
    def operation(self, activity: str) -> Iterator[None]:
        """Name what the ranks do together next.

        Errors then say it, and a rank that left before completing it is missed at once by every
        peer, not only by the one that waits for its message.
        """
        self._activity = activity
        self._begun += 1
        yield
        self._completed += 1

    def _missing(self, peer: int | None) -> str | None:
        """Return the text about a rank that left and is needed: the peer, or any rank."""
        for rank, (completed, reason) in list(self._left.items()):  # threads add to it meanwhile
            if rank == peer or completed < self._begun:
                return (
                    f"rank {rank} left ({reason}) while rank {self.rank} waited for it "
                    f"in {self._activity}"
                )
        return None

    def leave(self, reason: str, patience_seconds: float | None = None) -> list[int]:
        """Resign, and return when every peer has resigned too, or with the ranks that have not.

        patience_seconds: how long to wait for them; None: for ever, with a word now and then.
        """
        self.resign(reason)
        begun = time.monotonic()
        next_warning = begun + STALL_WARNING_SECONDS
        while True:
            self.collect_resignations()
            others = [r for r in range(self.size) if r != self.rank and r not in self._left]
            now = time.monotonic()
            if not others or (patience_seconds is not None and now > begun + patience_seconds):
                return others
            if now > next_warning:
                next_warning = now + STALL_WARNING_SECONDS
                say(f"rank {self.rank} is done ({reason}) and waits for {others} to end, too")
            time.sleep(0.001)

    def exchange(self, message: Array, peer: int) -> Array:
        """Swap messages with a rank that does the same."""
        sent = self.send(message, peer)
        received = self.receive(peer)
        sent()
        return received

    def allgather(self, message: Array) -> list[Array]:
        """Return every rank's message (uint8, of any size), in rank order.

        Bruck et al. 1997: ceil(log2 P) rounds; in round j a rank sends all it holds (at most 2^j
        messages) to the rank 2^j below it. Each rank sends P-1 messages' worth of bytes.
        """
        held = [message]  # of ranks self.rank, self.rank + 1, ...
        distance = 1
        while distance < self.size:
            wanted = min(distance, self.size - distance)
            sent = self.send(_pack(held[:wanted]), (self.rank - distance) % self.size)
            source = (self.rank + distance) % self.size
            held += _unpack(self.receive(source), wanted, source)
            sent()
            distance *= 2
        return [held[(rank - self.rank) % self.size] for rank in range(self.size)]

    def broadcast(self, message: Array | None, root: int) -> Array:
        """Return the root's message (uint8); the others' argument is not looked at.

        A binomial tree: round j doubles the ranks that hold the message.
        """
        place = (self.rank - root) % self.size
        distance = 1
        while distance < self.size:
            if place < distance and place + distance < self.size:
                assert message is not None
                self.send(message, (self.rank + distance) % self.size)()
            elif distance <= place < 2 * distance:
                message = self.receive((self.rank - distance) % self.size)
            distance *= 2
        assert message is not None
        return message

    def allreduce(self, array: Array, reduction: str = "sum") -> None:
        """Reduce a one-dimensional array over the ranks in place; the same bits on every rank.

        A ring: every chunk is reduced once, on its way round, and copied on. 2(P-1) messages and
        2(P-1)/P of the array's bytes per rank. float16 is added in float32, and rounded per hop.
        """
        if self.size == 1:
            return
        combine = REDUCTIONS[reduction]
        bounds = np.linspace(0, array.size, self.size + 1).astype(np.int64)
        chunks = [array[a:b] for a, b in itertools.pairwise(bounds)]
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for step in range(2 * (self.size - 1)):
            sent = self.send(
                np.ascontiguousarray(chunks[(self.rank - step) % self.size]).view(np.uint8),
                following,
            )
            mine = chunks[(self.rank - step - 1) % self.size]
            received = self.receive(previous)
            if received.size != mine.nbytes:
                raise MessageError(
                    f"the message from rank {previous} is malformed: a part of an allreduce has "
                    f"{received.size} bytes where rank {self.rank}'s has {mine.nbytes}; every rank "
                    "must pass an array of one size and dtype"
                )
            theirs = received.view(array.dtype)
            if step < self.size - 1:
                wide = np.float32 if array.dtype == np.float16 else array.dtype
                mine[...] = combine(mine.astype(wide, copy=False), theirs.astype(wide, copy=False))
            else:
                mine[...] = theirs
            sent()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.allgather(np.empty(0, np.uint8))


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
