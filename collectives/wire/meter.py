"""Meter: what writing and reading messages has taken this thread, and how long they became."""

from __future__ import annotations

import threading
from typing import Final, NamedTuple


class Coded(NamedTuple):
    """What encode and decode did.

    seconds: of both.
    entries, bytes: of the messages that were written, headers included.
    """

    seconds: float = 0.0
    entries: int = 0
    bytes: int = 0

    def since(self, earlier: Coded) -> Coded:
        """Return what has come to it."""
        return Coded(
            self.seconds - earlier.seconds,
            self.entries - earlier.entries,
            self.bytes - earlier.bytes,
        )


NOTHING_CODED: Final = Coded()


class _OfThread(threading.local):
    """A rank's messages are written and read by one thread, its engine's."""

    total = NOTHING_CODED


_here: Final = _OfThread()


def coded() -> Coded:
    """Return what this thread has coded since it began."""
    return _here.total


def count(seconds: float, entries: int = 0, message_bytes: int = 0) -> None:
    """Add a message that was written, or the time of reading one."""
    before = _here.total
    _here.total = Coded(
        before.seconds + seconds, before.entries + entries, before.bytes + message_bytes
    )
