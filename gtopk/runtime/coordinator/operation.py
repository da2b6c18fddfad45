"""Operation: something all ranks do together, its announcement, and its events for observers.

The engine passes an operation's events to observers (for a timeline, say):

    engine.add_observer(observer)  observer(event) is called in the engine's thread: be quick
    engine.remove_observer(observer)

    begin negotiate  name         some rank, this one or another, is the first to be ready
    mark  ready      name, rank   that rank is ready; once for each rank
    end   negotiate  name         all ranks are ready (or it failed, and nothing executes)
    begin execute    name
    begin copy-in    name         only dense arrays that are reduced together: into the buffer
    end   copy-in    name
    begin reduce     name         only dense arrays
    end   reduce     name
    begin copy-out   name         as copy-in
    end   copy-out   name
    end   execute    name
    mark  cycle      ""           all ranks have made their announcements

Arrays that are reduced together begin and end each of these at the same time.

In a cycle ranks exchange announcements. Each rank's fixed-size block is gathered on all of them:

    head             i64: the protocol's number, and the length of the text in bytes
    ready            one bit for each cached name that became ready here, 64 to a word

If only cached names became ready, that is all: one small message a round. Otherwise a second gather
exchanges texts: new and changed names, changed flags, and ranks that join or leave.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgpack
import numpy as np

from collectives.errors import CollectiveError, MessageError, PeerTimeoutError
from collectives.transports import Transport

from ...errors import HorovodInternalError
from .fusion import Dense, Layout

# Upper half: "gtk" and a version; lower half: the length of the text.
_PROTOCOL: Final = 0x67746B01 << 32
_WORD_BITS: Final = 64


class OperationSpec(NamedTuple):
    """A rank's description of an operation; the operation is refused unless all ranks' are equal.

    join_descriptor: bytes from which a joined rank makes its part; None: it cannot take part.
    dense:  the layout of each array that the engine reduces over the ranks.
    """

    signature: tuple[str, ...]
    join_descriptor: bytes | None
    dense: tuple[Layout, ...]

    def words(self) -> list[str]:
        """Return its parts as texts, for errors to quote."""
        join_descriptor = self.join_descriptor
        descriptor = [] if join_descriptor is None else [f"join descriptor {join_descriptor!r}"]
        return [*self.signature, *(layout.describe() for layout in self.dense), *descriptor]


class Request(NamedTuple):
    """A name that became ready on a rank; flags: int64 that may differ between ranks."""

    name: str
    spec: OperationSpec
    flags: int


class Announcement(NamedTuple):
    """One rank's message in a cycle.

    ready:   the cached names that became ready, as bits.
    fresh:   names that became ready, and are not cached or have a new spec.
    changed_flags: by slot number: this rank's flags of cached names that changed since its last
             announcement of them.
    joins:   whether this rank joins.
    leaves:  why this rank leaves; None: it stays.
    expired: names that this rank has waited for too long, each with an error text.
    stuck:   the name that this rank's only submitting thread waits for; None: it may submit more.
    limits:  cache capacity and fusion threshold; the smallest values of all ranks count. Only in
             the first cycle.
    """

    ready: int = 0
    fresh: tuple[Request, ...] = ()
    changed_flags: Mapping[int, int] = {}
    joins: bool = False
    leaves: str | None = None
    expired: Mapping[str, str] = {}
    stuck: str | None = None
    limits: tuple[int, ...] = ()

    @property
    def has_changes(self) -> bool:
        """Whether it may change which operations run: something became ready, joins or leaves."""
        return bool(self.ready or self.fresh or self.joins or self.leaves is not None)

    def text(self) -> bytes:
        """Return all but the ready bits, as msgpack; b"" if the rest is empty."""
        if self[1:] == EMPTY[1:]:
            return b""
        packed: bytes = msgpack.packb(self[1:])
        return packed


EMPTY: Final = Announcement()


def gather_announcements(
    transport: Transport, announcement: Announcement, names: int
) -> list[Announcement]:
    """Return every rank's announcement, in rank order. A collective.

    names: the number of ready bits; equal on all ranks.
    Raises MessageError for malformed announcements.
    """
    if transport.size == 1:
        return [announcement]
    text = announcement.text()
    words = -(-names // _WORD_BITS)
    own = (_PROTOCOL | len(text)).to_bytes(8, "little") + announcement.ready.to_bytes(
        8 * words, "little"
    )
    size, block = transport.size, len(own)
    # Blocks have one size on all ranks, so no lengths need to be exchanged first.
    buffer = np.empty(size * block, np.uint8)
    buffer[transport.rank * block : (transport.rank + 1) * block] = np.frombuffer(own, np.uint8)
    transport.allgather_into(buffer, range(0, size * block + 1, block))
    gathered = buffer.tobytes()
    # The usual case costs one bytes comparison and no decoding.
    if not text and gathered == own * size:
        return [announcement] * size
    blocks = [gathered[start : start + block] for start in range(0, len(gathered), block)]
    heads = [int.from_bytes(block[:8], "little") for block in blocks]
    for rank, head in zip(transport.ranks, heads, strict=True):
        if head >> 32 != _PROTOCOL >> 32:
            raise MessageError(
                f"the message from rank {rank} is malformed: its head is {head:#x}; every rank "
                "must run the same version of gtopk"
            )
    texts = [b""] * size
    # All ranks have the same heads, so all or none enter the second gather.
    if any(head != _PROTOCOL for head in heads):
        texts = [t.tobytes() for t in transport.allgather(np.frombuffer(text, np.uint8))]
    return [
        _decode(int.from_bytes(block[8:], "little"), text, rank)
        for block, text, rank in zip(blocks, texts, transport.ranks, strict=True)
    ]


def _decode(ready: int, text: bytes, rank: int) -> Announcement:
    if not text:
        return Announcement(ready)
    try:
        # Slot numbers are int keys, hence strict_map_key. Specs are compared as tuples.
        fresh, *rest = msgpack.unpackb(text, use_list=False, strict_map_key=False)
        requests = tuple(Request(name, _read_spec(*spec), flags) for name, spec, flags in fresh)
        return Announcement(ready, requests, *rest)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(
            f"the message from rank {rank} is malformed: its announcement is {text[:50]!r}"
        ) from error


def _read_spec(
    signature: tuple[str, ...], join_descriptor: bytes | None, dense: tuple[tuple[Any, ...], ...]
) -> OperationSpec:
    return OperationSpec(signature, join_descriptor, tuple(Layout(*layout) for layout in dense))


def cycle_bytes(ranks: int, names: int) -> int:
    """Return the bytes that a rank sends in a cycle in which only cached names become ready.

    names: the largest number of cached names.
    """
    return (ranks - 1) * 8 * (1 + -(-names // _WORD_BITS))


Phase = Literal["begin", "end", "mark"]
EventKind = Literal["negotiate", "ready", "execute", "copy-in", "reduce", "copy-out", "cycle"]


class Event(NamedTuple):
    """One event for observers; see the module docstring for the list.

    seconds: when it happened, on the clock of time.perf_counter.
    rank:    the world rank that is ready; only for "ready".
    """

    phase: Phase
    what: EventKind
    name: str
    seconds: float
    rank: int | None = None


Observer = Callable[[Event], None]


# An operation's function: called with the transport and every rank's flags, in rank order.
Work = Callable[[Transport, list[int]], Any]


def do_nothing(transport: Transport, all_flags: list[int]) -> None:
    """Do nothing: the work of an operation that only synchronises ranks, or is already done."""


# Makes a joined rank's work from an operation's name and join descriptor.
ShadowWork = Callable[[str, bytes], Work]


class Operation:
    """Something all ranks do together, and its outcome; `wait` returns its result.

    ranks:         the number of ranks.
    agree_seconds: how long this rank waited until all ranks were known to be ready.
    sent_bytes, sent_messages: traffic that this rank sent for it. Arrays reduced together count for
                   the first of them, and a cycle for the first operation that runs after it.
    """

    def __init__(
        self,
        request: Request,
        ranks: int,
        work: Work,
        fusion: Sequence[Dense],
        wake_for: Callable[[Operation], threading.Event | None],
        where: Callable[[], str],
    ) -> None:
        """wake_for: tells the engine that a thread waits; returns an event, or None if it is done.

        where: returns this rank's current step.
        """
        self.name = request.name
        self.request = request
        self.ranks = ranks
        self.work = work
        self.fusion = fusion
        # All set now: it may fail before it is announced or agreed on.
        self.submitted = self.announced = self.agreed = time.perf_counter()
        self.agree_seconds = 0.0
        self.sent_bytes = self.sent_messages = 0
        self.done = False  # whether `wait` would return at once
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished: threading.Event | None = None  # made for the first waiting thread
        self._wake_for = wake_for
        self._where = where

    def wait(self) -> Any:
        """Return the result, or raise HorovodInternalError (or what `work` raised)."""
        if not self.done and (finished := self._wake_for(self)):
            finished.wait()
        if isinstance(self.error, CollectiveError):
            raise self._failure(self.error) from None
        if self.error is not None:
            raise self.error
        return self.result

    def _failure(self, error: CollectiveError) -> HorovodInternalError:
        """Return the exception for the script, with the step added unless its text names one."""
        text, where = str(error), self._where()
        if isinstance(error, PeerTimeoutError):
            text += "; set a larger GTOPK_TIMEOUT (seconds) to wait longer"
        elif self.name not in text:
            text += f"; '{self.name}' cannot complete"
        # Match the whole word: "at step 1" is not in "at step 12".
        if where and not re.search(rf"{re.escape(where)}\b", text):
            text += f"; {where}"
        failure = HorovodInternalError(text)
        failure.operation = self.name
        return failure

    def begin(self) -> None:
        """Note that execution begins."""
        self.agree_seconds = self.agreed - self.announced

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome, and free work and arrays; the caller holds the engine's lock."""
        self.result, self.error = result, error
        self.work, self.fusion = do_nothing, ()
        # Set last: `wait` reads `done` without the lock, and then the outcome.
        self.done = True
        if self.finished is not None:
            self.finished.set()
