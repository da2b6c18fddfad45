"""Counters: what a rank sent and how long it waited; numbers and memory that ranks share.

A rank can add to a shared number and write to shared memory without the other ranks' help.
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

    wait_seconds: for messages to arrive or leave, and inside the library's own allreduce.
    parent:       counts the same: a view's messages are also its parent's.
    Several threads may count at the same time.
    """

    sent_bytes: int = 0
    sent_messages: int = 0
    # Not compared: waits differ between runs, sent bytes do not.
    wait_seconds: float = field(default=0.0, compare=False)
    parent: Traffic | None = field(default=None, compare=False, repr=False)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, compare=False, repr=False
    )

    def count(self, sent_bytes: int, sent_messages: int = 1) -> None:
        """Add sent bytes and messages."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.sent_messages += sent_messages
        # Outside the lock, so that no thread holds the locks of two counters.
        if self.parent is not None:
            self.parent.count(sent_bytes, sent_messages)

    def count_allreduce(self, length: int, value_bytes: int, ranks: int) -> None:
        """Add a library's own allreduce by formula (bandwidth-optimal), as it cannot be counted."""
        self.count(cost.dense_bytes(length, ranks, value_bytes), 2 * cost.rounds(ranks))

    def count_wait(self, seconds: float) -> None:
        """Add a wait, in seconds."""
        with self._lock:
            self.wait_seconds += seconds
        if self.parent is not None:
            self.parent.count_wait(seconds)

    def read_and_reset(self) -> Traffic:
        """Return the counters and reset them to zero; the parent's are kept."""
        with self._lock:
            taken = Traffic(self.sent_bytes, self.sent_messages, self.wait_seconds)
            self.sent_bytes = self.sent_messages = 0
            self.wait_seconds = 0.0
        return taken


class Counter(Protocol):
    """A number that all ranks share, initially 0."""

    def add(self, amount: int) -> int:
        """Add atomically, and return the number before that.

        Raises PeerError or PeerTimeoutError if the rank that keeps the number is gone.
        """


class LocalCounter:
    """A counter for threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0

    def add(self, amount: int) -> int:
        """Add, and return the number before that."""
        with self._lock:
            before = self._number
            self._number = before + amount
        return before


class NodeMemory(Protocol):
    """Memory shared by the ranks of one host.

    bytes: uint8 [size], the same memory for all of them; initially zeros; page-aligned.
    place, places: this rank's number among them, and their count.
    """

    bytes: Array
    place: int
    places: int

    def lock(self) -> AbstractContextManager[object]:
        """Enter as the only rank; released if a rank dies inside. Not reentrant."""

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives; False is final."""
