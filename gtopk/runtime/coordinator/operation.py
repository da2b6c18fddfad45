"""Operation: something all ranks do together, and its outcome.

Observer: what the engine tells while it works, for a timeline.

    engine.observe(observer)      observer(event) is called in the engine's thread: be quick
    engine.ignore(observer)

An operation, from the first rank that is ready for it:

    begin negotiate  name         some rank is ready, this one or another
    mark  ready      name, rank   which one; once for each rank
    end   negotiate  name         all are (or it failed: then nothing is executed)
    begin execute    name
    begin copy-in    name         only of dense arrays that are reduced as one: into the buffer
    end   copy-in    name
    begin reduce     name         only of dense arrays
    end   reduce     name
    begin copy-out   name         as copy-in
    end   copy-out   name
    end   execute    name
    mark  cycle      ""           all ranks have said what they are ready for

Arrays that are reduced as one begin and end each of these at the same time.

Announcement: what a rank tells the others in a cycle, and how all hear of it.

Every rank has a block on a board that is gathered on all of them:

    head             i64: the protocol's number, and how many bytes of text follow
    ready            a bit for each cached name that became ready here, 64 to a word

When only cached names became ready, that is all: one small message a round. Otherwise the texts are
gathered, too: names that are new or changed, flags that are, a rank that joins or leaves.
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
from collectives.transports import Traffic, Transport

from ...errors import HorovodInternalError
from .fusion import Dense, Layout

_PROTOCOL: Final = 0x67746B01 << 32
_WORD_BITS: Final = 64


class Intention(NamedTuple):
    """What a rank is about to do under a name; equal on all ranks, or it is not done.

    join_descriptor: what a rank that has joined needs to take part; None: it cannot.
    dense:  of each array that is reduced over the ranks.
    """

    signature: tuple[str, ...]
    join_descriptor: bytes | None
    dense: tuple[Layout, ...]

    def words(self) -> list[str]:
        """Return all of it, as an error quotes it."""
        joined = self.join_descriptor
        descriptor = [] if joined is None else [f"join descriptor {joined!r}"]
        return [*self.signature, *(layout.describe() for layout in self.dense), *descriptor]


class ReadyName(NamedTuple):
    """A name that became ready on a rank; flags: int64 that may differ between ranks."""

    name: str
    intention: Intention
    flags: int


class Announcement(NamedTuple):
    """What a rank tells in a cycle.

    ready:   the cached names that became ready, as bits.
    fresh:   the names that are not cached, or not with this intention.
    all_flags:   of cached names, by their number: those that are not what they were last time.
    joins:   whether this rank joins.
    leaves:  why this rank leaves; None: it stays.
    expired: names that this rank has waited for too long, and the text about it.
    stuck:   the name without which this rank will submit nothing more.
    limits:  what the least of all ranks counts of: said in the first cycle.
    """

    ready: int = 0
    fresh: tuple[ReadyName, ...] = ()
    all_flags: Mapping[int, int] = {}
    joins: bool = False
    leaves: str | None = None
    expired: Mapping[str, str] = {}
    stuck: str | None = None
    limits: tuple[int, ...] = ()

    @property
    def is_news(self) -> bool:
        """Whether it may change what the ranks do."""
        return bool(self.ready or self.fresh or self.joins or self.leaves is not None)

    def text(self) -> bytes:
        """Return all but the bits; nothing when there is nothing."""
        if self[1:] == _NOTHING[1:]:
            return b""
        packed: bytes = msgpack.packb(self[1:])
        return packed


_NOTHING: Final = Announcement()


def exchange(transport: Transport, announcement: Announcement, names: int) -> list[Announcement]:
    """Return what every rank says, in rank order; all ranks do so together.

    names: how many bits there are; equal on all ranks.
    Raises MessageError for what is no announcement.
    """
    if transport.size == 1:
        return [announcement]
    text = announcement.text()
    words = -(-names // _WORD_BITS)
    own = (_PROTOCOL | len(text)).to_bytes(8, "little") + announcement.ready.to_bytes(
        8 * words, "little"
    )
    size, block = transport.size, len(own)
    board = np.empty(size * block, np.uint8)
    board[transport.rank * block : (transport.rank + 1) * block] = np.frombuffer(own, np.uint8)
    transport.allgather_into(board, range(0, size * block + 1, block))
    gathered = board.tobytes()
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
        fresh, *rest = msgpack.unpackb(text, use_list=False, strict_map_key=False)
        known = tuple(
            ReadyName(name, _intention(*intention), flags) for name, intention, flags in fresh
        )
        return Announcement(ready, known, *rest)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(
            f"the message from rank {rank} is malformed: what it says in a cycle is {text[:50]!r}"
        ) from error


def _intention(
    signature: tuple[str, ...], join_descriptor: bytes | None, dense: tuple[tuple[Any, ...], ...]
) -> Intention:
    return Intention(signature, join_descriptor, tuple(Layout(*layout) for layout in dense))


def cycle_bytes(ranks: int, names: int) -> int:
    """Return what a rank sends in a cycle in which only cached names become ready.

    names: how many there are, at most.
    """
    return (ranks - 1) * 8 * (1 + -(-names // _WORD_BITS))


Phase = Literal["begin", "end", "mark"]
What = Literal["negotiate", "ready", "execute", "copy-in", "reduce", "copy-out", "cycle"]


class Event(NamedTuple):
    """Something the engine did.

    seconds: on the clock of time.perf_counter.
    rank:    in the world; only of "ready".
    """

    phase: Phase
    what: What
    name: str
    seconds: float
    rank: int | None = None


Observer = Callable[[Event], None]


# What an operation does: it gets the transport and every rank's flags, in rank order.
Work = Callable[[Transport, list[int]], Any]

# What a rank that has joined does for the others' operation, from its name and join descriptor.
StandIn = Callable[[str, bytes], Work]


class Operation:
    """Something all ranks do together, and its outcome.

    ranks:         how many they are.
    queue_seconds: how long it waited for the operations before it, here.
    agree_seconds: how long this rank took, and waited, to hear that all are ready.
    traffic:       what this rank sent for it. Arrays that are reduced as one count for the first of
                   them, and a cycle for the first operation that is run after it.
    """

    def __init__(
        self,
        ready_name: ReadyName,
        ranks: int,
        work: Work,
        fusion: Sequence[Dense],
        hurry: Callable[[Operation], threading.Event | None],
        where: Callable[[], str],
    ) -> None:
        """hurry: tells the engine that somebody waits; returns what to wait for.

        where: says at which step this rank is.
        """
        self.name = ready_name.name
        self.ready_name = ready_name
        self.ranks = ranks
        self.work = work
        self.fusion = fusion
        self.submitted = self.said = self.agreed = time.perf_counter()
        self.queue_seconds = self.agree_seconds = 0.0
        self.done = False  # whether `wait` would return at once
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished: threading.Event | None = None  # made for the first that waits
        self._hurry = hurry
        self._where = where
        self._traffic: Traffic | None = None

    @property
    def traffic(self) -> Traffic:
        if self._traffic is None:
            self._traffic = Traffic()
        return self._traffic

    def wait(self) -> Any:
        """Return the result, or raise HorovodInternalError (or what `work` raised)."""
        if not self.done and (finished := self._hurry(self)):
            finished.wait()
        if isinstance(self.error, CollectiveError):
            raise self._failure(self.error) from None
        if self.error is not None:
            raise self.error
        return self.result

    def _failure(self, error: CollectiveError) -> HorovodInternalError:
        """Return what the script is told, with the step where the text has it not already."""
        text, where = str(error), self._where()
        if isinstance(error, PeerTimeoutError):
            text += "; a larger GTOPK_TIMEOUT (seconds) waits longer"
        elif self.name not in text:
            text += f"; '{self.name}' cannot be done"
        if where and not re.search(rf"{re.escape(where)}\b", text):
            text += f"; {where}"
        failure = HorovodInternalError(text)
        failure.operation = self.name
        return failure

    def begin(self) -> None:
        """Note that it is its turn."""
        self.agree_seconds = self.agreed - self.said
        self.queue_seconds = time.perf_counter() - self.submitted - self.agree_seconds

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome, and let go of all else; the engine's lock is held."""
        self.result, self.error = result, error
        self.work, self.fusion = _nothing, ()
        self.done = True
        if self.finished is not None:
            self.finished.set()


def _nothing(transport: Transport, all_flags: list[int]) -> None:
    """Stand for the work that is done."""
