"""Counters: what a rank sent and how long it waited; numbers and memory that ranks share.

A rank adds to a shared number, and writes into shared memory, without the others' taking part.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from .. import cost
from ..vector import Array


@dataclass
class Traffic:
    """Counts messages and bytes that this rank sent, and its waits, since `read_and_reset`.

    wait_seconds: for messages to come or go, and inside an allreduce of the library's own.
    parent:       counts the same, too: a view's messages are also those of its parent.
    Several threads may count at the same time.
    """

    sent_bytes: int = 0
    sent_messages: int = 0
    # Not compared: waits differ from run to run, what is sent does not.
    wait_seconds: float = field(default=0.0, compare=False)
    parent: Traffic | None = field(default=None, compare=False, repr=False)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, compare=False, repr=False
    )

    def count(self, sent_bytes: int, sent_messages: int = 1) -> None:
        """Add bytes and messages that were sent."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.sent_messages += sent_messages
        # Outside of the lock: no thread ever holds those of two counters.
        if self.parent is not None:
            self.parent.count(sent_bytes, sent_messages)

    def count_allreduce(self, length: int, value_bytes: int, ranks: int) -> None:
        """Add an allreduce of a library's own, as a bandwidth-optimal one: nothing can count it."""
        self.count(cost.dense_bytes(length, ranks, value_bytes), 2 * cost.rounds(ranks))

    def count_wait(self, seconds: float) -> None:
        """Add the seconds of a wait."""
        with self._lock:
            self.wait_seconds += seconds
        if self.parent is not None:
            self.parent.count_wait(seconds)

    def read_and_reset(self) -> Traffic:
        """Return the counters and set them to zero; the parent's stay."""
        with self._lock:
            taken = Traffic(self.sent_bytes, self.sent_messages, self.wait_seconds)
            self.sent_bytes = self.sent_messages = 0
            self.wait_seconds = 0.0
        return taken


class Counter(Protocol):
    """A number that all ranks share, 0 at first."""

    def add(self, amount: int) -> int:
        """Add at once for all ranks, and return what the number was before.

        Raises PeerError, or PeerTimeoutError, where the rank that keeps the number is gone.
        """


class LocalCounter:
    """A counter of the threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0

    def add(self, amount: int) -> int:
        """Add, and return what the number was before."""
        with self._lock:
            before = self._number
            self._number = before + amount
        return before


class NodeMemory(Protocol):
    """Memory of the ranks of one host.

    bytes: uint8 [size], the same for all of them; zeros at first, at the start of a page.
    place, places: this rank's number among them, and how many there are.
    """

    bytes: Array
    place: int
    places: int

    def lock(self) -> AbstractContextManager[object]:
        """Enter as the only rank; a rank that dies inside releases it. It is not reentrant."""

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives; once it does not, it never will."""
