"""A number that all ranks share, and memory that the ranks of one host share.

A rank can add to the number and write to the memory without the other ranks' help.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Protocol

from ..vector import Array


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
