"""Carrier: the transport of all ranks, which also carries the messages of its views.

A view is a transport of a subset of the ranks, or a separate stream of messages. Carriers whose
messages arrive in the background put them into a `Mailbox`, where the receiving streams sleep.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..cost import Link
from ..errors import PeerError, PeerTimeoutError
from ..telemetry import Traffic
from ..vector import Array
from .counters import Counter, NodeMemory
from .departure import DepartureNotice
from .node_memory import open_shared_memory
from .pacing import Pacer, append_stamp, split_stamp
from .reductions import append_checksum, strip_checksum
from .transport import CHANNELS, STALL_WARNING_SECONDS, Path, Step, Transport, print_line


class Overlay(Transport):
    """Ranks of another transport, the `host`, which handles everything about the whole world."""

    host: Transport

    def __init__(
        self, host: Transport, ranks: Sequence[int], rank: int, path: Path, tag: int, count: Traffic
    ) -> None:
        super().__init__(ranks, rank, path, tag, count)
        self.host = host
        self.name = host.name
        self.timeout_seconds = host.timeout_seconds
        self.announces_waits = host.announces_waits

    @property
    def checks_messages(self) -> bool:
        return self.host.checks_messages

    def check_messages(self) -> None:
        self.host.check_messages()

    @property
    def link(self) -> Link | None:
        return self.host.link

    def emulate(self, link: Link) -> None:
        self.host.emulate(link)

    def departures(self) -> Mapping[int, DepartureNotice]:
        return self.host.departures()

    def collect_departures(self) -> None:
        self.host.collect_departures()

    def announce_departure(self, reason: str) -> None:
        self.host.announce_departure(reason)

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        return self.host.leave(reason, leave_timeout_seconds)

    def lose(self, rank: int, reason: str) -> None:
        self.host.lose(rank, reason)

    def abort(self, exit_code: int, reason: str = "") -> None:
        self.host.abort(exit_code, reason)

    def library(self) -> str:
        return self.host.library()


class Stream(Transport):
    """A stream of messages over a carrier: of all its ranks (the carrier itself) or of a view."""

    carrier: Carrier

    def send(self, message: Array, to: int) -> Callable[[], None]:
        return self.carrier.send_from(self, message, self.ranks[to])

    def receive(self, source: int) -> Array:
        return self.carrier.receive_for(self, self.ranks[source])

    def conclude(self) -> None:
        self.carrier.conclude_on(self)

    def view(self, step: Step, ranks: Sequence[int]) -> Transport:
        return self.carrier.view_of(self, step, ranks)

    def counter(self) -> Counter:
        return self.carrier.counter_on(self)

    def shared_memory(self, size_bytes: int) -> NodeMemory:
        return open_shared_memory(self, size_bytes)


class View(Stream, Overlay):
    """A subset of a carrier's ranks, or a separate stream of messages.

    It counts its own traffic, which also counts for its parent transport.
    """

    def __init__(
        self, carrier: Carrier, parent: Transport, path: Path, ranks: Sequence[int], tag: int
    ) -> None:
        rank = ranks.index(carrier.rank)
        super().__init__(carrier, ranks, rank, path, tag, Traffic(parent=parent.traffic))
        self.supports_device_messages = carrier.supports_device_messages
        self.carrier = carrier
        self._parent = parent

    @property
    def activity(self) -> str:
        return self._activity or self._parent.activity

    @property
    def begun(self) -> int:
        # Inside an operation of the parent, a view's messages belong to that operation.
        return self._begun if self._activity else self._parent.begun

    def misses(self, rank: int, notice: DepartureNotice) -> bool:
        # A view may be used inside an operation of its parent, which needs all of the parent's
        # members.
        return super().misses(rank, notice) or self._parent.misses(rank, notice)

    def neighbours(self) -> list[int]:
        on_host = set(self.host.neighbours())
        return [place for place, rank in enumerate(self.ranks) if rank in on_host]


_CHECK_SECONDS: Final = 0.001  # how often a leaving rank checks which others have left


class Carrier(Stream):
    """One rank of a world; a subclass connects it to the others.

    A subclass implements `send_on`, `announce_departure`, `abort`, `neighbours` and `own_library`;
    and `collect_departures` unless something else fills `_left`. If messages arrive in the
    background, it puts them into `mailbox`; without a mailbox it implements `receive_on`.
    One thread per stream calls `send_on` and `receive_on`; threads of several streams may call them
    at once.
    tag_limit: upper bound (exclusive) for stream tags.
    """

    tag_limit: int = 1 << 31
    mailbox: Mailbox | None = None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(range(size), rank, (), 0, Traffic())
        self.carrier = self
        self._left: dict[int, DepartureNotice] = {}
        self._views: dict[Path, Transport] = {(): self}
        self._tags: dict[int, Path] = {0: ()}
        self._views_lock = threading.Lock()
        self._counters: dict[Path, int] = {}  # by stream: how many counters were made
        self._checks_messages = False
        self._pacer: Pacer | None = None

    @property
    def checks_messages(self) -> bool:
        return self._checks_messages

    def check_messages(self) -> None:
        self._checks_messages = True

    @property
    def link(self) -> Link | None:
        return None if self._pacer is None else self._pacer.link

    def emulate(self, link: Link) -> None:
        if len(self.neighbours()) < self.size:
            raise ValueError(
                f"a link is emulated between ranks of one host, whose clock they share: rank "
                f"{self.rank} has {len(self.neighbours())} of {self.size} ranks on its host"
            )
        self._pacer = Pacer(link)

    def library(self) -> str:
        return f"{self.own_library()}{f', {self.link_text}' if self.link else ''}"

    @abstractmethod
    def own_library(self) -> str:
        """Return name and version of the underlying library, also under emulation."""

    @abstractmethod
    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        """Begin to send to a world rank, in the order of the stream; like `send`."""

    def receive_on(self, stream: Transport, source: int) -> Array:
        """Return the next message that a world rank sent on this stream; like `receive`.

        Checks `stream.missing(source)` while it waits; counts the wait in the stream's traffic.
        """
        assert self.mailbox is not None
        return self.mailbox.pop(stream, source)

    def conclude_on(self, stream: Transport) -> None:
        """`conclude` a stream's operation; nothing to do if sent messages arrive by themselves."""

    def send_from(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        """Send a message on a stream like `send_on`, with checksum or pacing if enabled."""
        if self.checks_messages:
            message = append_checksum(message)
        stream.traffic.count(message.size)
        pacer = self._pacer
        # A message to this rank itself crosses no link.
        if pacer is None or to == self.rank:
            return self.send_on(stream, message, to)
        begins, last_byte_at = pacer.reserve_outbound(message.size)
        # The stamp goes outside the checksum: the receiver removes it first. It is not counted, as
        # no real network would carry it.
        sent = self.send_on(stream, append_stamp(message, begins), to)

        def finish() -> None:
            sent()
            self._await(pacer, stream, last_byte_at)

        return finish

    def receive_for(self, stream: Transport, source: int) -> Array:
        """Return the next message of a stream like `receive_on`, after checks and pacing."""
        message = self.receive_on(stream, source)
        if self._pacer is not None and source != self.rank:
            message, begins = split_stamp(message, source)
            self._await(self._pacer, stream, self._pacer.reserve_inbound(begins, message.size))
        return strip_checksum(message, source) if self.checks_messages else message

    def _await(self, pacer: Pacer, stream: Transport, at: float) -> None:
        stream.traffic.count_wait(max(0.0, at - pacer.clock.now()))
        pacer.clock.wait_until(at, self.progress)

    def progress(self) -> None:
        """Advance messages, if the library only does so while it is called."""

    def view_of(self, parent: Transport, step: Step, ranks: Sequence[int]) -> Transport:
        """Return the view one step below a parent."""
        path = (*parent.path, step)
        # Two threads must get the same object for a view: it counts the stream's operations.
        with self._views_lock:
            if path not in self._views:
                tag = tag_of(path, self.tag_limit)
                if tag in self._tags:
                    raise ValueError(
                        f"the streams {path} and {self._tags[tag]} would share the tag {tag} on "
                        f"rank {self.rank}; give one of them another channel number"
                    )
                self._tags[tag] = path
                self._views[path] = View(self, parent, path, ranks, tag)
            return self._views[path]

    def counter_on(self, stream: Transport) -> Counter:
        """Return a new counter for a stream's ranks; like `counter`. A collective on the stream."""
        raise ValueError(
            f"the transport {self.name!r} has no number that its ranks share; start them with "
            "mpirun and mpi4py, or with torchrun"
        )

    def name_counter(self, stream: Transport) -> str:
        """Return a name for a stream's new counter, the same on all its ranks."""
        # From stream and number: ranks make a stream's counters in the same order, so this needs no
        # message.
        number = self._counters[stream.path] = self._counters.get(stream.path, 0) + 1
        return f"{stream.path}, counter {number}"

    def departures(self) -> Mapping[int, DepartureNotice]:
        return self._left.copy()  # other threads may add to it meanwhile

    def collect_departures(self) -> None:
        """Do nothing: a thread, or another rank, already notes departures."""

    def departure_notice(self, reason: str) -> DepartureNotice:
        """Return the notice that this rank sends its peers when it leaves."""
        # Copy to a list, as other threads may add views meanwhile.
        views = list(self._views.values())
        completed = {view.tag: view.completed for view in views if view.completed}
        missed = (found for view in views if (found := view.find_missing(None)))
        return DepartureNotice(completed, reason, next(missed, None))

    def lose(self, rank: int, reason: str) -> None:
        self.note(rank, DepartureNotice({}, reason, lost=True))
        self._wake()

    def note(self, rank: int, notice: DepartureNotice) -> None:
        """Note that a rank has left; its own notice replaces notices from others."""
        earlier = self._left.get(rank)
        if earlier is None or (earlier.lost and not notice.lost):
            self._left[rank] = notice

    def _wake(self) -> None:
        """Make threads that wait at the mailbox check again for departures."""
        if self.mailbox is not None:
            self.mailbox.wake()

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        self.announce_departure(reason)
        begun = time.monotonic()
        next_warning = begun + STALL_WARNING_SECONDS
        while True:
            self.collect_departures()
            others = [r for r in range(self.size) if r != self.rank and r not in self._left]
            now = time.monotonic()
            if not others or (
                leave_timeout_seconds is not None and now > begun + leave_timeout_seconds
            ):
                return others
            if self.announces_waits and now > next_warning:
                next_warning = now + STALL_WARNING_SECONDS
                print_line(
                    f"rank {self.rank} is done ({reason}) and waits for {others} to end, too"
                )
            time.sleep(_CHECK_SECONDS)


# Messages from one rank on one stream. None only wakes a waiting thread, as a rank has left.
_Box = queue.SimpleQueue["Array | None"]


class Mailbox:
    """Messages by stream and source, in order; several threads put, one thread per stream pops."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._boxes: dict[tuple[int, int], _Box] = {}
        self._waited_for: dict[_Box, None] = {}

    def put(self, tag: int, source: int, message: Array) -> None:
        """Add a message of a world rank to the stream with this tag."""
        self._box(tag, source).put(message)

    def wake(self) -> None:
        """Make waiting threads check again for departures."""
        # Copy, as other threads begin and end their waits meanwhile.
        for box in self._waited_for.copy():
            box.put(None)

    @property
    def has_waiters(self) -> bool:
        """Tell whether any stream waits for a message."""
        return bool(self._waited_for)

    def pop(self, stream: Transport, source: int) -> Array:
        """Return the next message of a world rank on a stream; count the wait in its traffic.

        Raises PeerError if a required rank has left, PeerTimeoutError if none has.
        """
        return self._pop(stream, stream.tag, source, f"rank {source}", source)

    def pop_reply(self, stream: Transport, tag: int) -> Array:
        """Return this rank's own message with this tag, put once all ranks have taken part."""
        return self._pop(stream, tag, stream.ranks[stream.rank], "its peers", None)

    def _pop(self, stream: Transport, tag: int, source: int, who: str, peer: int | None) -> Array:
        box = self._box(tag, source)
        begun = time.monotonic()
        warning_seconds = STALL_WARNING_SECONDS if stream.announces_waits else math.inf
        next_warning = begun + warning_seconds
        deadline = begun + self.timeout_seconds
        # Register before reading `missing`: if a rank leaves in between, its wake lands in the
        # box.
        self._waited_for[box] = None
        try:
            while True:
                # Read before the box: a rank that has left sent all its messages before that.
                missing = stream.missing(peer)
                remaining = min(next_warning, deadline) - time.monotonic()
                try:
                    message = box.get(timeout=0 if missing else max(0.0, remaining))
                except queue.Empty:
                    if missing:
                        raise PeerError(missing) from None
                else:
                    # None is a wake, maybe left over from an earlier wait: it only costs another
                    # check.
                    if message is not None:
                        return message
                now = time.monotonic()
                rank = stream.ranks[stream.rank]
                waited = f"rank {rank} has waited {now - begun:.3g} s"
                waiting = f"{waited} for {who} in {stream.activity}"
                if now >= deadline:
                    raise PeerTimeoutError(waiting)
                if now >= next_warning:
                    next_warning = now + warning_seconds
                    print_line(waiting)
        finally:
            del self._waited_for[box]
            stream.traffic.count_wait(time.monotonic() - begun)

    def _box(self, tag: int, source: int) -> _Box:
        try:
            return self._boxes[tag, source]
        except KeyError:
            # Atomic: otherwise one of two threads' boxes would be lost, with its message.
            return self._boxes.setdefault((tag, source), queue.SimpleQueue())


def tag_of(path: Path, limit: int) -> int:
    """Return a stream's tag below `limit`, the same on every rank.

    The stream of all ranks has tag 0, its channels the next ones, without collisions; any other
    path is hashed to the rest.
    """
    match path:
        case ():
            return 0
        case (int(channel),):
            return 1 + channel
    # Uses only the path, to avoid a message for agreeing on tags; `view_of` refuses collisions.
    digest = hashlib.blake2b(repr(path).encode(), digest_size=8).digest()
    return 1 + CHANNELS + int.from_bytes(digest, "little") % (limit - 1 - CHANNELS)
