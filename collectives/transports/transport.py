"""Transport: the operations of the ranks' connection that algorithms use.

A transport implements `send`, `receive` and the few facts below; everything else is built here
from those two, so that every transport counts what it sends and no wait lasts for ever. One
thread uses a transport at a time, and every rank calls the same operations in the same order.

A view is a transport, too: some of the ranks (`subset`), or a stream of messages beside the others
(`channel`). Views of a view compose. Each may be used by a thread of its own at the same time.
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
from ..vector import Array
from . import reductions
from .counters import Counter, NodeMemory, Traffic
from .departure import DepartureNotice
from .reductions import Endpoint

STALL_WARNING_SECONDS: Final = 60.0  # how often a rank that waits says so
# Channels have tags of their own, which cannot collide: so there is a bound on them.
CHANNELS: Final = 1024

# How a view is made: a subset by the world ranks of its members, a channel by its number. All the
# steps from the transport of all ranks are its path: equal on all members, another for each view.
Step = tuple[int, ...] | int
Path = tuple[Step, ...]


def print_line(text: str) -> None:
    """Print a line on stderr, in one write: lines of several ranks share it.

    Where stderr is closed, or its reader is gone, the line is lost: that ends no job.
    """
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

    traffic: counts every message given to `send`, also through a view of this transport; see
             `allreduce` for the one exception.
    tag:     a number of this transport's stream of messages, equal on all members; 0 for the
             stream of all ranks.
    counts_allreduce: whether `allreduce` is counted message by message, or by formula.
    timeout_seconds:  the longest a rank waits for a peer.
    announces_waits: whether a rank that waits for long says so.
    full_speed_bytes: from so many on an allreduce has its full speed: joining two gains nothing.
    supports_device_messages: whether messages may be arrays in a GPU's memory.
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
        self.completed = 0  # operations
        self._members = frozenset(ranks)
        self._begun = 0
        self._activity = ""

    def subset(self, ranks: Sequence[int]) -> Transport:
        """Return the transport of these ranks, numbered 0, 1, ... in the order given.

        Only its members may ask for it; nothing is sent to make one. Raises ValueError where this
        rank is not among them, or the ranks are not distinct ranks of this transport.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ValueError(
                f"a subset must be distinct ranks of 0..{self.size - 1}, got {list(ranks)} "
                f"on rank {self.ranks[self.rank]}"
            )
        if self.rank not in ranks:
            raise ValueError(
                f"only members make a subset: rank {self.rank} is not in {list(ranks)}"
            )
        members = tuple(self.ranks[int(rank)] for rank in ranks)
        return self.view(members, members)

    def channel(self, number: int) -> Transport:
        """Return a transport of the same ranks with a stream of messages of its own.

        number: 0..1023, equal on all ranks; nothing is sent to make one.
        """
        if not 0 <= number < CHANNELS:
            raise ValueError(f"channel must lie in 0..{CHANNELS - 1}, got {number}")
        return self.view(number, self.ranks)

    def connect(self, device: int | None = None) -> None:
        """Prepare for messages in GPU memory, where that is needed; all ranks call it together.

        A view that was not connected may send them through the hosts.
        device: the GPU, by its number; None: the current one.
        """

    def carries(self, tensor: Any) -> bool:
        """Tell whether dense collectives take a tensor of torch's in its own memory.

        Of a GPU where nothing has to travel, or NCCL carries what is there; sends nothing. A tensor
        that is taken is one-dimensional and contiguous; bool travels as uint8.
        """
        return self.size == 1 and tensor.device.type == "cuda"

    def carrying(self, on_gpu: bool, what: Hashable = None) -> Transport:
        """Return the transport for vectors that each rank has on its GPU, or on its host.

        All ranks call it together; the first time for a `what` they may exchange a message.
        what: a key of these vectors, as others may lie elsewhere; equal on all ranks.
        """
        return self

    @property
    def tensor_place(self) -> str:
        """torch's name of the device of tensors that `carries` accepts."""
        return "cuda"

    @abstractmethod
    def check_messages(self) -> None:
        """Add a checksum to every message of the world, on all views, from now on.

        All ranks call it at the same place in their messages. Dense collectives are then made of
        messages, not the library's own. NCCL's messages are not checked.
        """

    @property
    def link(self) -> Link | None:
        """The link that is emulated for each rank; None: messages are not paced."""
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

        All ranks call it at the same place in their messages. Dense collectives are then made of
        messages, not the library's own. NCCL's messages, counters and shared memory are not paced.
        Raises ValueError where the ranks are on several hosts.
        """

    @property
    def handles_messages(self) -> bool:
        """Whether every message is checked or paced: none may be a library's own, or a GPU's."""
        return self.checks_messages or self.link is not None

    @abstractmethod
    def view(self, step: Step, ranks: Sequence[int]) -> Transport:
        """Return the view one step on from this transport; the same step, the same object.

        ranks: of its members, in the world.
        """

    @abstractmethod
    def announce_departure(self, reason: str) -> None:
        """Tell every rank of the world that this one has left.

        Returns at once; only the first reason counts. Ranks that wait for this one get an error.
        """

    @abstractmethod
    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        """Announce the departure; return when every peer has, too, or with the ranks that have not.

        leave_timeout_seconds: how long to wait for them; None: for ever, with a word now and then.
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
        """End the whole job now, every rank of it; the others say why, where the word arrives."""

    @abstractmethod
    def neighbours(self) -> list[int]:
        """Return the ranks on this rank's host, itself included, in order; nothing is sent."""

    def node(self) -> list[int]:
        """Return the ranks that this one reaches without a network, itself included, in order.

        Over an emulated link each rank is by itself.
        """
        return self.neighbours() if self.link is None else [self.rank]

    @abstractmethod
    def counter(self) -> Counter:
        """Return a new number that the ranks share, 0 at first; all of them call this together.

        Any thread may add to it at any time; the other ranks need take no part.
        Raises ValueError where the transport has nothing of the kind.
        """

    @abstractmethod
    def shared_memory(self, size_bytes: int) -> NodeMemory:
        """Return new zeros that the ranks map; all of them call this together, and on one host.

        Raises OSError, on every rank, where there is no room for them.
        """

    @abstractmethod
    def library(self) -> str:
        """Return name and version of the library that carries the messages."""

    def native_bytes(self) -> int:
        """Return from how many bytes on an allreduce is the library's own, not made of messages.

        sys.maxsize: all are made of messages. Equal on all ranks.
        """
        return sys.maxsize

    @abstractmethod
    def departures(self) -> Mapping[int, DepartureNotice]:
        """Return the departure notices known here, by world rank."""

    @property
    def sends_from_device(self) -> bool:
        """Whether messages in GPU memory travel past the hosts' memory; the same on all ranks."""
        return False

    @property
    def activity(self) -> str:
        """The name of the operation under way, for an error's text."""
        return self._activity or "an exchange"

    @property
    def begun(self) -> int:
        """The number of operations begun on this stream, which is that of the one under way.

        The same on all ranks that are in it.
        """
        return self._begun

    @contextmanager
    def operation(self, activity: str) -> Iterator[None]:
        """Begin an operation that the ranks do together, and name it.

        Errors name it. When a rank leaves before completing it, every peer gets an error at once,
        not only the one that waits for its message, also in views of this transport that are used
        inside. An operation within an operation is a part of it.
        """
        if self._activity:
            yield
            return
        self._activity = activity
        self._begun += 1
        try:
            yield
            # Before it counts as completed: from then on peers need nothing more of this rank, if
            # it leaves.
            self.conclude()
            self.completed = self._begun  # one that failed is over, too
        finally:
            self._activity = ""

    @abstractmethod
    def conclude(self) -> None:
        """Wait until this rank's part of an operation reaches its peers without further calls."""

    def missing(self, peer: int | None) -> str | None:
        """Return the text about a rank that left and is needed: the peer, or any member.

        peer: its rank in the world; None: all members are needed.
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
        """Return the rank that left and is needed, as in `missing`, and its departure notice.

        Where a rank left because another had, the first one that left is returned.
        """
        for rank, notice in self.departures().items():
            # The peer counts whatever it has completed: it will never send what is waited for.
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
            # Notices nest: a rank that left because another was gone passes that one's notice on.
            while link:
                rank, notice = link
                if notice.lost:
                    found.add(rank)
                link = notice.missed
        return sorted(found)

    def exchange(self, message: Array, peer: int) -> Array:
        """Swap messages with a rank that does the same."""
        return next(self.exchange_all([(message, peer)], [peer]))

    def exchange_all(
        self, messages: Iterable[tuple[Array, int]], sources: Sequence[int]
    ) -> Iterator[Array]:
        """Send messages, each to its rank, and yield the next one of each source, in that order.

        The receivers and the sources call `exchange_all`, too: together the calls are one step, in
        which no rank waits for a turn. Later messages may be made while the first are sent.
        """
        sends = [self.send(message, to) for message, to in messages]
        # Not a generator itself, which would send nothing until its first message is asked for.
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
        # The sends are waited for before the last message is given away: who takes as many messages
        # as there are sources does not come back to this generator.
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
        """Return the root's message (uint8); the others' argument is ignored.

        A binomial tree: round j doubles the ranks that hold the message.
        """
        # Counted from the root: the tree is that of rank 0, turned.
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
        array's bytes per rank; beyond 4 MiB messages go in pieces, and a word answers each piece
        from 128 KiB on. Up to 4096/(P-1) bytes, half the messages and P-1 times the bytes.
        float16 and BFLOAT16 (of `kernels.narrow`) are reduced in float32, and rounded per hop.
        """
        reductions.allreduce(self, array, reduction)

    def reduce_scatter(self, array: Array, bounds: Sequence[int], reduction: str = "sum") -> None:
        """Reduce array[bounds[rank]:bounds[rank+1]], the part this rank owns, in place.

        The other parts are left with partial results. ceil(log2 P) messages per rank, and the
        bytes of all parts but one.
        """
        reductions.reduce_scatter(self, array, bounds, reduction)

    def allgather_into(self, array: Array, bounds: Sequence[int]) -> None:
        """Fill in place the parts of the array that others own, array[bounds[r]:bounds[r+1]].

        ceil(log2 P) messages per rank, and the bytes of all parts but one.
        """
        reductions.allgather_into(self, array, bounds)

    def broadcast_into(self, array: Array, root: int) -> None:
        """Fill a one-dimensional array in place with the root's; of one size and dtype everywhere.

        The messages of `broadcast`. Raises MessageError where the root's is of another size.
        """
        if self.size == 1:
            return
        own = array.view(np.uint8)
        message = self.broadcast(own if self.rank == root else None, root)
        if message.size != own.size:
            raise MessageError(
                f"rank {self.ranks[root]} broadcasts {message.size} bytes where rank "
                f"{self.ranks[self.rank]}'s array has {own.size}; all must be alike"
            )
        if self.rank != root:
            own[...] = message

    def alltoall(self, array: Array, bounds: Sequence[int]) -> tuple[Array, list[int]]:
        """Send array[bounds[rank]:bounds[rank+1]] to each rank; return what they send here.

        Returns a new array with the ranks' parts in rank order, and its own bounds. In one step:
        rank + 1, rank + 2, ... get their parts while rank - 1, rank - 2, ... send theirs. Every
        rank passes the same dtype.
        """
        if self.size == 1:  # of a GPU, too: tensors are cloned, arrays copied
            part: Any = array[bounds[0] : bounds[1]]
            return (part.clone if hasattr(part, "clone") else part.copy)(), [0, len(part)]
        parts = [array[a:b].view(np.uint8) for a, b in itertools.pairwise(bounds)]
        received = self.exchange_with_all(parts)
        sizes = [part.size // array.itemsize for part in received]
        return np.concatenate(received).view(array.dtype), [0, *itertools.accumulate(sizes)]

    def exchange_with_all(self, messages: Sequence[Array]) -> list[Array]:
        """Send messages[rank] to each rank, in one step; return theirs, in rank order."""
        others = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        sources = others[::-1]
        received = self.exchange_all([(messages[to], to) for to in others], sources)
        by_source = {self.rank: messages[self.rank], **dict(zip(sources, received, strict=True))}
        return [by_source[source] for source in range(self.size)]

    def gather_object(self, mine: Any) -> list[Any]:
        """Return every rank's object, in rank order; every rank calls it.

        An object is what JSON has: numbers (floats to the bit), texts, booleans, None, lists and
        dicts with texts as keys; tuples arrive as lists. It is for rare, small messages; use
        `allgather` for vectors. Raises MessageError, which names the rank, for invalid JSON.
        """
        messages = self.allgather(_as_message(mine))
        return [_as_object(m, rank) for m, rank in zip(messages, self.ranks, strict=True)]

    def broadcast_object(self, mine: Any, root: int = 0) -> Any:
        """Return the root's object, of `gather_object`'s types; the others' is ignored."""
        own = _as_message(mine) if self.rank == root else None
        return _as_object(self.broadcast(own, root), self.ranks[root])

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.allgather(np.empty(0, np.uint8))


def _as_message(obj: Any) -> Array:
    return np.frombuffer(json.dumps(obj).encode(), np.uint8)


def _as_object(message: Array, sender: int) -> Any:
    try:
        return json.loads(message.tobytes())
    # RecursionError: of brackets that are nested deeper than Python goes.
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the object from rank {sender} is malformed: {error}") from error
