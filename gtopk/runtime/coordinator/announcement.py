"""Announcement: what a rank tells the others in a cycle, and how all hear of it.

Every rank has a block on a board that is gathered on all of them:

    head             i64: the protocol's number, and how many bytes of text follow
    ready            a bit for each cached name that became ready here, 64 to a word

When only cached names became ready, that is all: one small message a round. Otherwise the texts are
gathered, too: names that are new or changed, flags that are, a rank that joins or leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from collectives.errors import MessageError
from collectives.transports import Transport

from .fusion import Layout

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
