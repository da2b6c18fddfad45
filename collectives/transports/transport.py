"""Transport: the connection between ranks, and the operations that algorithms use on it.

A transport implements `send`, `receive` and a few facts below. Everything else is built here from
those two, so that every transport counts what it sends and every wait ends. Only one thread uses a
transport at a time, and every rank calls the same operations in the same order.

A view is also a transport: a subset of the ranks (`subset`), or a separate stream of messages
(`channel`). Views of views are possible. Each may be used by its own thread at the same time.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import numpy as np

from ..cost import Link
from ..errors import MessageError
from ..telemetry import Traffic
from ..vector import Array
from . import reductions
from .counters import Counter, NodeMemory
from .departure import DepartureNotice
from .reductions import Endpoint

STALL_WARNING_SECONDS: Final = 60.0  # how often a waiting rank prints a warning
# Limited, because each channel has a tag of its own, without collisions.
CHANNELS: Final = 1024

# The step that makes a view: a subset's world ranks, or a channel's number. A view's path is the
# list of steps from the transport of all ranks: equal on all members, unique for each view.
Step = tuple[int, ...] | int
Path = tuple[Step, ...]


def print_line(text: str) -> None:
    """Print a line to stderr in one write, as several ranks share it.

    If stderr is closed or its reader is gone, the line is lost, without an error.
    """
    if sys.stderr is not None:  # else print() would write to stdout
        with suppress(OSError, ValueError):
            print(f"gtopk: {text}\n", end="", file=sys.stderr, flush=True)


def end_process(exit_code: int) -> NoReturn:
    """End this process at once, without exit handlers, which would wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    os._exit(exit_code)


class Transport(Endpoint):
    """The connection between `size` ranks, seen from one of them.

    traffic: counts every message given to `send`, including through views of this transport; see
             `allreduce` for the only exception.
    tag:     a number for this transport's stream of messages, equal on all members; 0 for the
             stream of all ranks.
    counts_allreduce: whether `allreduce` is counted message by message, or by formula.
    timeout_seconds:  the longest a rank waits for a peer.
    announces_waits: whether a rank that waits long prints a warning.
    full_speed_bytes: size from which an allreduce runs at full speed, so joining two gains nothing.
    supports_device_messages: whether messages may be arrays in GPU memory.
    """

    name: str
    counts_allreduce = True
    timeout_seconds = 600.0
    announces_waits = True
    full_speed_bytes = 1 << 20
    supports_device_messages = False

    def __init__(self, ranks: Sequence[int], rank: int, path: Path, tag: int, traffic: Traffic):
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.path = path
        self.tag = tag
        self.traffic = traffic
        self.completed = 0  # number of completed operations
        self._members = frozenset(ranks)
        self._begun = 0
        self._activity = ""

    def subset(self, ranks: Sequence[int]) -> Transport:
        """Return the transport of these ranks, numbered 0, 1, ... in the given order.

        Only its members may call this; it sends nothing. Raises ValueError if this rank is not
        among them, or the ranks are not distinct ranks of this transport.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ValueError(
                f"a subset must be distinct ranks of 0..{self.size - 1}, got {list(ranks)} "
                f"on rank {self.ranks[self.rank]}"
            )
        if self.rank not in ranks:
            raise ValueError(
                f"only members may call subset: rank {self.rank} is not in {list(ranks)}"
            )
        members = tuple(self.ranks[int(rank)] for rank in ranks)
        return self.view(members, members)

    def channel(self, number: int) -> Transport:
        """Return a transport of the same ranks with its own stream of messages.

        number: 0..1023, equal on all ranks; sends nothing.
        """
        if not 0 <= number < CHANNELS:
            raise ValueError(f"channel must lie in 0..{CHANNELS - 1}, got {number}")
        return self.view(number, self.ranks)

    def connect(self, device: int | None = None) -> None:
        """Prepare for messages in GPU memory, if needed. A collective.

        A view that was not connected may send them through the hosts.
        device: the GPU's number; None: the current one.
        """

    def carries(self, tensor: Any) -> bool:
        """Tell whether dense collectives accept a torch tensor in its own memory.

        True for a GPU tensor if nothing has to travel, or NCCL carries it; sends nothing. An
        accepted tensor is one-dimensional and contiguous; bool travels as uint8.
        """
        return self.size == 1 and tensor.device.type == "cuda"

    def carrying(self, on_gpu: bool, key: Hashable = None) -> Transport:
        """Return the transport for vectors that each rank has either on its GPU or on its host.

        A collective: the first call for a `key` may exchange a message.
        key: of these vectors, as others may be elsewhere; equal on all ranks.
        """
        return self

    @property
    def tensor_place(self) -> str:
        """torch's name for the device of tensors that `carries` accepts."""
        return "cuda"

    @abstractmethod
    def check_messages(self) -> None:
        """Add a checksum to every message of the world, on all views, from now on.

        All ranks call it at the same place in their messages. Dense collectives then consist of
        messages, instead of the library's own calls. NCCL messages are not checked.
        """

    @property
    def link(self) -> Link | None:
        """The link emulated for each rank; None: messages are not paced."""
        return None

    @property
    def link_text(self) -> str:
        """The emulated link in words: "emulated link of 100 Mbit/s, 0.4 ms"; "" without one."""
        if self.link is None:
            return ""
        rate, latency = self.link.bits_per_second / 1e6, 1e3 * self.link.latency_seconds
        return f"emulated link of {rate:g} Mbit/s{f', {latency:g} ms' if latency else ''}"

    @abstractmethod
    def emulate(self, link: Link) -> None:
        """Pace every message from now on as if each rank had such a link, on all views.

        All ranks call it at the same place in their messages. Dense collectives then consist of
        messages, instead of the library's own calls. NCCL messages, counters and shared memory are
        not paced. Raises ValueError if the ranks are on several hosts.
        """

    @property
    def handles_messages(self) -> bool:
        """Whether every message is checked or paced, which excludes a library's own and a GPU's."""
        return self.checks_messages or self.link is not None

    @abstractmethod
    def view(self, step: Step, ranks: Sequence[int]) -> Transport:
        """Return the view one step below this transport; the same step gives the same object.

        ranks: its members, as world ranks.
        """

    @abstractmethod
    def announce_departure(self, reason: str) -> None:
        """Tell every rank of the world that this one has left.

        Returns at once; only the first reason counts. Ranks that wait for this one get an error.
        """

    @abstractmethod
    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        """Announce the departure; wait for every peer's, and return the ranks that have not left.

        leave_timeout_seconds: limit for that wait; None: for ever, with a warning now and then.
        """

    @abstractmethod
    def collect_departures(self) -> None:
        """Collect new departure notices for `departures`."""

    @abstractmethod
    def lose(self, rank: int, reason: str) -> None:
        """Note that a rank of the world is gone, as known by other means.

        Threads that wait for it here get an error. Its own departure notice replaces this reason.
        """

    @abstractmethod
    def abort(self, exit_code: int, reason: str = "") -> None:
        """End every rank of the whole job now; the others print the reason if they receive it."""

    @abstractmethod
    def neighbours(self) -> list[int]:
        """Return the ranks on this rank's host, including itself, in order; sends nothing."""

    def node(self) -> list[int]:
        """Return the ranks that this one reaches without a network, including itself, in order.

        Over an emulated link, that is only this rank.
        """
        return self.neighbours() if self.link is None else [self.rank]

    @abstractmethod
    def counter(self) -> Counter:
        """Return a new number that the ranks share, initially 0. A collective.

        Later any thread may add to it at any time, without the other ranks taking part.
        Raises ValueError if the transport does not support it.
        """

    @abstractmethod
    def shared_memory(self, size_bytes: int) -> NodeMemory:
        """Return new zeros that the ranks map. A collective, of ranks on one host.

        Raises OSError on every rank if there is no room for them.
        """

    @abstractmethod
    def library(self) -> str:
        """Return name and version of the library that carries the messages."""

    def native_bytes(self) -> int:
        """Return the size in bytes from which an allreduce is the library's own call.

        sys.maxsize: all consist of messages. Equal on all ranks.
        """
        return sys.maxsize

    @abstractmethod
    def departures(self) -> Mapping[int, DepartureNotice]:
        """Return the departure notices known here, by world rank."""

    @property
    def sends_from_device(self) -> bool:
        """Whether messages in GPU memory bypass host memory; the same on all ranks."""
        return False

    @property
    def activity(self) -> str:
        """The name of the current operation, for errors."""
        return self._activity or "an exchange"

    @property
    def begun(self) -> int:
        """The number of operations begun on this stream, including the current one.

        The same on all ranks that take part in it.
        """
        return self._begun

    @contextmanager
    def operation(self, activity: str) -> Iterator[None]:
        """Begin an operation of all ranks, and name it for errors.

        If a rank leaves before completing it, every peer gets an error at once, not only the one
        that waits for its message; this includes views of this transport used inside. A nested
        operation is part of the outer one.
        """
        if self._activity:
            yield
            return
        self._activity = activity
        self._begun += 1
        try:
            yield
            # Before it counts as completed: after that, peers need nothing more from this rank if
            # it leaves.
            self.conclude()
            self.completed = self._begun  # a failed one is also over
        finally:
            self._activity = ""

    @abstractmethod
    def conclude(self) -> None:
        """Wait until this rank's part of an operation reaches its peers without further calls."""

    def missing(self, peer: int | None) -> str | None:
        """Return the error text about a required rank that has left: the peer, or any member.

        peer: its world rank; None: all members are required.
        """
        found = self.find_missing(peer)
        if found is None:
            return None
        rank, notice = found
        return (
            f"rank {rank} {'is lost' if notice.lost else 'left'} ({notice.reason}) while rank "
            f"{self.ranks[self.rank]} waited for it in {self.activity}"
        )

    def find_missing(self, peer: int | None) -> tuple[int, DepartureNotice] | None:
        """Return the required rank that has left, as in `missing`, and its departure notice.

        If a rank left because another one had, return the first one that left.
        """
        for rank, notice in self.departures().items():
            # However much the peer has completed, it will never send the awaited message.
            if rank == peer or self.misses(rank, notice):
                cause = notice.missed
                return cause if cause and self.misses(*cause) else (rank, notice)
        return None

    def misses(self, rank: int, notice: DepartureNotice) -> bool:
        """Tell whether a rank left before it completed the operation of this stream."""
        return rank in self._members and notice.completed.get(self.tag, 0) < self._begun

    def lost(self) -> list[int]:
        """Return the world ranks known here to have died without a notice."""
        found = set()
        for rank, notice in self.departures().items():
            link: tuple[int, DepartureNotice] | None = (rank, notice)
            # Notices nest: a rank that left because another was gone passes on its notice.
            while link:
                rank, notice = link
                if notice.lost:
                    found.add(rank)
                link = notice.missed
        return sorted(found)

    def exchange(self, message: Array, peer: int) -> Array:
        """Swap messages with a rank that calls this as well."""
        return next(self.exchange_all([(message, peer)], [peer]))

    def exchange_all(
        self, messages: Iterable[tuple[Array, int]], sources: Sequence[int]
    ) -> Iterator[Array]:
        """Send messages, each to its rank, and yield the next one of each source, in that order.

        The receivers and sources must call `exchange_all` as well: together the calls are one step,
        in which no rank waits for a turn. `messages` may make later ones while the first are sent.
        """
        sends = [self.send(message, to) for message, to in messages]
        # Not itself a generator, which would send nothing until its first message is requested.
        if sources:
            return self.receive_each(sources, sends)
        for sent in sends:
            sent()
        return iter(())

    def receive_each(
        self, sources: Sequence[int], sends: list[Callable[[], None]]
    ) -> Iterator[Array]:
        for source in sources[:-1]:
            yield self.receive(source)
        # Wait for the sends before yielding the last message: a caller that takes only as many
        # messages as there are sources does not resume this generator.
        last = self.receive(sources[-1])
        for sent in sends:
            sent()
        yield last

    def allgather(self, message: Array) -> list[Array]:
        """Return every rank's message (uint8, of any size), in rank order.

        Bruck et al. 1997: ceil(log2 P) rounds; in round j a rank sends all it holds (at most 2^j
        messages) to the rank 2^j below it. Each rank sends P-1 messages' worth of bytes.
        """
        return reductions.allgather(self, message)

    def broadcast(self, message: Array | None, root: int) -> Array:
        """Return the root's message (uint8); other ranks' arguments are ignored.

        A binomial tree: round j doubles the ranks that hold the message.
        """
        # Places are relative to the root, so any root uses the tree of rank 0.
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

        reduction: "sum", "product", "min" or "max". 2 ceil(log2 P) messages and 2(P-1)/P of the
        array's bytes per rank. Beyond 4 MiB, messages are sent in pieces; an empty message confirms
        each piece from 128 KiB on. Up to 4096/(P-1) bytes: half the messages and P-1 times the
        bytes. float16 and BFLOAT16 (`kernels.narrow`) are reduced in float32, rounded per hop.
        """
        reductions.allreduce(self, array, reduction)

    def reduce_scatter(self, array: Array, bounds: Sequence[int], reduction: str = "sum") -> None:
        """Reduce array[bounds[rank]:bounds[rank+1]], the part that this rank owns, in place.

        The other parts hold partial results afterwards. ceil(log2 P) messages per rank, and the
        bytes of all parts but one.
        """
        reductions.reduce_scatter(self, array, bounds, reduction)

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        """Fill in place the parts of the array that others own, array[bounds[r]:bounds[r+1]].

        ceil(log2 P) messages per rank, and the bytes of all parts but one.
        """
        reductions.allgather_into(self, array, bounds)

    def broadcast_into(self, array: Array, root: int) -> None:
        """Fill a one-dimensional array with the root's, in place; size and dtype must be equal.

        Sends the messages of `broadcast`. Raises MessageError if the root's size differs.
        """
        if self.size == 1:
            return
        own = array.view(np.uint8)
        message = self.broadcast(own if self.rank == root else None, root)
        if message.size != own.size:
            raise MessageError(
                f"rank {self.ranks[root]} broadcasts {message.size} bytes, but rank "
                f"{self.ranks[self.rank]}'s array has {own.size}; all arrays must be equally large"
            )
        if self.rank != root:
            own[...] = message

    def alltoall(self, array: Array, bounds: Sequence[int]) -> tuple[Array, list[int]]:
        """Send array[bounds[rank]:bounds[rank+1]] to each rank; return what they send here.

        Returns a new array with the ranks' parts in rank order, and its bounds. In one step: rank +
        1, rank + 2, ... get their parts while rank - 1, rank - 2, ... send theirs. The dtype must
        be equal on all ranks.
        """
        if self.size == 1:  # also on a GPU: tensors have clone, arrays have copy
            part: Any = array[bounds[0] : bounds[1]]
            return (part.clone if hasattr(part, "clone") else part.copy)(), [0, len(part)]
        parts = [array[a:b].view(np.uint8) for a, b in itertools.pairwise(bounds)]
        received = self.exchange_with_all(parts)
        sizes = [part.size // array.itemsize for part in received]
        return np.concatenate(received).view(array.dtype), [0, *itertools.accumulate(sizes)]

    def exchange_with_all(self, messages: Sequence[Array]) -> list[Array]:
        """Send messages[rank] to each rank in one step; return theirs, in rank order."""
        others = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        sources = others[::-1]
        received = self.exchange_all([(messages[to], to) for to in others], sources)
        by_source = {self.rank: messages[self.rank], **dict(zip(sources, received, strict=True))}
        return [by_source[source] for source in range(self.size)]

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in rank order. A collective.

        An object is anything in JSON: numbers (floats bit for bit), texts, booleans, None, lists
        and dicts with text keys; tuples arrive as lists. Use it for rare, small messages, and
        `allgather` for vectors. Raises MessageError, which names the rank, for invalid JSON.
        """
        messages = self.allgather(_as_message(obj))
        return [_as_object(m, rank) for m, rank in zip(messages, self.ranks, strict=True)]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object, of `gather_object`'s types; others' arguments are ignored."""
        own = _as_message(obj) if self.rank == root else None
        return _as_object(self.broadcast(own, root), self.ranks[root])

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.allgather(np.empty(0, np.uint8))


def _as_message(obj: Any) -> Array:
    return np.frombuffer(json.dumps(obj).encode(), np.uint8)


def _as_object(message: Array, sender: int) -> Any:
    try:
        return json.loads(message.tobytes())
    # RecursionError: brackets nested deeper than Python's limit.
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the object from rank {sender} is malformed: {error}") from error
