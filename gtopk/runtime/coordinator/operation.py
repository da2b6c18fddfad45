"""Operation: something all ranks do together; how ranks announce it, and what observers see of it.

The events of an operation, which the engine passes to observers (for a timeline, say):

    engine.add_observer(observer)  observer(event) is called in the engine's thread: be quick
    engine.remove_observer(observer)

    begin negotiate  name         a first rank is ready, this one or another
    mark  ready      name, rank   that rank is ready; once for each rank
    end   negotiate  name         all ranks are (or it failed: then nothing is executed)
    begin execute    name
    begin copy-in    name         only of dense arrays that are reduced as one: into the buffer
    end   copy-in    name
    begin reduce     name         only of dense arrays
    end   reduce     name
    begin copy-out   name         as copy-in
    end   copy-out   name
    end   execute    name
    mark  cycle      ""           all ranks have announced what they are ready for

Arrays that are reduced as one begin and end each of these at the same time.

In a cycle ranks exchange announcements. Each rank's fixed-size block is gathered on all of them:

    head             i64: the protocol's number, and how many bytes of text follow
    ready            a bit for each cached name that became ready here, 64 to a word

When only cached names became ready, that is all: one small message a round. Otherwise texts are
gathered, too: new and changed names, changed flags, and that a rank joins or leaves.
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

# "gtk" and a version above, and in the lower half the length of the text.
_PROTOCOL: Final = 0x67746B01 << 32
_WORD_BITS: Final = 64


class OperationSpec(NamedTuple):
    """A rank's description of an operation; the operation is refused unless all ranks' are equal.

    join_descriptor: the bytes from which a rank that has joined makes its part; None: it cannot
            take part.
    dense:  the layout of each array that the engine reduces over the ranks.
    """

    signature: tuple[str, ...]
    join_descriptor: bytes | None
    dense: tuple[Layout, ...]

    def words(self) -> list[str]:
        """Return its parts as the texts that an error quotes."""
        joined = self.join_descriptor
        descriptor = [] if joined is None else [f"join descriptor {joined!r}"]
        return [*self.signature, *(layout.describe() for layout in self.dense), *descriptor]


class Request(NamedTuple):
    """A name that became ready on a rank; flags: int64 that may differ between ranks."""

    name: str
    spec: OperationSpec
    flags: int


class Announcement(NamedTuple):
    """One rank's message in a cycle.

    ready:   the cached names that became ready, as bits.
    fresh:   names that became ready and are not cached, or with another spec.
    changed_flags: this rank's flags of cached names that changed since it last announced them, by
             slot number.
    joins:   whether this rank joins.
    leaves:  why this rank leaves; None: it stays.
    expired: names that this rank has waited for too long, each with the error's text.
    stuck:   the name that this rank's only submitting thread waits for; None: it may submit more.
    limits:  the cache's capacity and the fusion threshold, of which the smallest of all ranks
             counts; only in the first cycle.
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
    def is_news(self) -> bool:
        """Whether it may change which operations run: something became ready, joins or leaves."""
        return bool(self.ready or self.fresh or self.joins or self.leaves is not None)

    def text(self) -> bytes:
        """Return all but the ready bits, as msgpack; b"" where the rest is empty."""
        if self[1:] == _NOTHING[1:]:
            return b""
        packed: bytes = msgpack.packb(self[1:])
        return packed


_NOTHING: Final = Announcement()


def gather_announcements(
    transport: Transport, announcement: Announcement, names: int
) -> list[Announcement]:
    """Return every rank's announcement, in rank order; all ranks must call it together.

    names: the number of ready bits; equal on all ranks.
    Raises MessageError for bytes that are no announcement.
    """
    if transport.size == 1:
        return [announcement]
    text = announcement.text()
    words = -(-names // _WORD_BITS)
    own = (_PROTOCOL | len(text)).to_bytes(8, "little") + announcement.ready.to_bytes(
        8 * words, "little"
    )
    size, block = transport.size, len(own)
    # Blocks of one size on all ranks: no lengths need be exchanged before.
    board = np.empty(size * block, np.uint8)
    board[transport.rank * block : (transport.rank + 1) * block] = np.frombuffer(own, np.uint8)
    transport.allgather_into(board, range(0, size * block + 1, block))
    gathered = board.tobytes()
    # The usual case costs one comparison of bytes, and no decoding.
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
    # All ranks have the same heads, so all enter the second gather or none does.
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
        # Keys that are no texts: slots' numbers. Tuples, as the specs are compared with tuples.
        fresh, *rest = msgpack.unpackb(text, use_list=False, strict_map_key=False)
        known = tuple(Request(name, _read_spec(*spec), flags) for name, spec, flags in fresh)
        return Announcement(ready, known, *rest)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(
            f"the message from rank {rank} is malformed: what it says in a cycle is {text[:50]!r}"
        ) from error


def _read_spec(
    signature: tuple[str, ...], join_descriptor: bytes | None, dense: tuple[tuple[Any, ...], ...]
) -> OperationSpec:
    return OperationSpec(signature, join_descriptor, tuple(Layout(*layout) for layout in dense))


def cycle_bytes(ranks: int, names: int) -> int:
    """Return how many bytes a rank sends in a cycle in which only cached names become ready.

    names: the number of cached names, at most.
    """
    return (ranks - 1) * 8 * (1 + -(-names // _WORD_BITS))


Phase = Literal["begin", "end", "mark"]
What = Literal["negotiate", "ready", "execute", "copy-in", "reduce", "copy-out", "cycle"]


class Event(NamedTuple):
    """One event for observers; the module's docstring lists them.

    seconds: when it happened, on the clock of time.perf_counter.
    rank:    the rank in the world that is ready; only of "ready".
    """

    phase: Phase
    what: What
    name: str
    seconds: float
    rank: int | None = None


Observer = Callable[[Event], None]


# An operation's function: it gets the transport and every rank's flags, in rank order.
Work = Callable[[Transport, list[int]], Any]


def do_nothing(transport: Transport, all_flags: list[int]) -> None:
    """Do nothing: the work of an operation that only agrees with the other ranks, or is done."""


# Makes the work of a rank that has joined, from an operation's name and join descriptor.
ShadowWork = Callable[[str, bytes], Work]


class Operation:
    """Something all ranks do together, and its outcome; `wait` returns its result.

    ranks:         the number of ranks.
    agree_seconds: how long it took on this rank until all ranks were known to be ready.
    sent_bytes, sent_messages: what this rank sent for it. Arrays that are reduced as one count for
                   the first of them, and a cycle for the first operation that is run after it.
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
        """wake_for: tells the engine that a thread waits; returns its event, None where it is done.

        where: returns at which step this rank is.
        """
        self.name = request.name
        self.request = request
        self.ranks = ranks
        self.work = work
        self.fusion = fusion
        # All of now: it may fail before it is announced, or agreed on.
        self.submitted = self.announced = self.agreed = time.perf_counter()
        self.agree_seconds = 0.0
        self.sent_bytes = self.sent_messages = 0
        self.done = False  # whether `wait` would return at once
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished: threading.Event | None = None  # made for the first that waits
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
        """Return the exception for the script; the step is added unless its text names one."""
        text, where = str(error), self._where()
        if isinstance(error, PeerTimeoutError):
            text += "; a larger GTOPK_TIMEOUT (seconds) waits longer"
        elif self.name not in text:
            text += f"; '{self.name}' cannot be done"
        # As a whole word: "at step 1" is not in "at step 12".
        if where and not re.search(rf"{re.escape(where)}\b", text):
            text += f"; {where}"
        failure = HorovodInternalError(text)
        failure.operation = self.name
        return failure

    def begin(self) -> None:
        """Note that its execution begins."""
        self.agree_seconds = self.agreed - self.announced

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome, and free work and arrays; the caller holds the engine's lock."""
        self.result, self.error = result, error
        self.work, self.fusion = do_nothing, ()
        # After the outcome: `wait` reads `done` without the lock, and then the outcome.
        self.done = True
        if self.finished is not None:
            self.finished.set()
