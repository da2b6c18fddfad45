"""Counter: a number that all ranks share; a rank adds to it without the others' taking part."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol


class Counter(Protocol):
    """A number that all ranks share, 0 at first."""

    def add(self, amount: int) -> int:
        """Add at once for all ranks, and return what the number was before.

        Raises PeerError, or PeerTimeoutError, where the rank that keeps the number is gone.
        """


class Counts:
    """Numbers that threads of one process share, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, amount: int) -> int:
        """Add to a number, and return what it was before."""
        with self._lock:
            before = self._numbers[name]
            self._numbers[name] = before + amount
        return before


class LocalCounter:
    """A counter of the ranks of one process."""

    def __init__(self, counts: Counts | None = None, name: str = "") -> None:
        self._counts = counts or Counts()
        self._name = name

    def add(self, amount: int) -> int:
        """Add, and return what the number was before."""
        return self._counts.add(self._name, amount)
