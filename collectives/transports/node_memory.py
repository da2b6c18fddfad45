"""NodeMemory: bytes that the ranks of one host share, a lock on them, and who is still there.

Lock and presence are the kernel's: a file's byte ranges, which it frees when a process ends,
however it ends. So a rank that is killed holds up nobody, and is known to be gone at once:

    offset in the lock file    who locks it
    base + place               the rank at that place, for as long as it lives
    base + ranks               whoever holds the lock
"""

from __future__ import annotations

import fcntl
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

import numpy as np

from ..errors import PeerTimeoutError
from ..vector import Array

_BASE: Final = 1 << 40  # beyond all that is written: the file may be the memory, too
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 2e-6, 1e-3


class NodeMemory(Protocol):
    """Memory of the ranks of one host.

    bytes: uint8 [size], the same for all of them; zeros at first, at the start of a page.
    place, places: this rank's number among them, and how many there are.
    """

    bytes: Array
    place: int
    places: int

    def lock(self) -> AbstractContextManager[object]:
        """Enter as the only rank; who dies inside is out of it. Not to be entered twice."""

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives; once it does not, it never will."""


class FileMemory:
    """Memory of processes.

    file: open for reading and writing; closing it anywhere in this process frees its locks.
    """

    def __init__(self, memory: Array, file: int, place: int, places: int, seconds: float) -> None:
        self.bytes = memory
        self.place, self.places = place, places
        self._file = file
        self._timeout_seconds = seconds
        self._of_threads = threading.Lock()  # to the kernel a process is one
        self._gone: set[int] = set()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _BASE + place)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Enter as the only rank."""
        with self._of_threads:
            self._acquire()
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _BASE + self.places)

    def _acquire(self) -> None:
        """Lock; a holder that is frozen is waited for no longer than any peer is."""
        deadline = time.monotonic() + self._timeout_seconds
        pause_seconds = _SHORTEST_SLEEP_SECONDS
        while not self._try(fcntl.LOCK_EX, self.places):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"the memory of this host's {self.places} ranks has been locked for "
                    f"{self._timeout_seconds:g} s: one of them is frozen; place {self.place} waits"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_SLEEP_SECONDS)

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives."""
        if place == self.place:
            return True
        if place not in self._gone and self._try(fcntl.LOCK_SH, place):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _BASE + place)
            self._gone.add(place)
        return place not in self._gone

    def _try(self, kind: int, place: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, _BASE + place)
        except (BlockingIOError, PermissionError):
            return False
        return True


class OfThreads:
    """What the threads of a process share."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes: Array = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)[:size_bytes]
        self.lock = threading.Lock()


class ThreadMemory:
    """Memory of the threads of one process.

    has_left: tells of a place whether its rank takes part no more.
    """

    def __init__(
        self, shared: OfThreads, place: int, places: int, has_left: Callable[[int], bool]
    ) -> None:
        self.bytes = shared.bytes
        self.place, self.places = place, places
        self._shared = shared
        self._has_left = has_left

    def lock(self) -> AbstractContextManager[object]:
        """Enter as the only rank."""
        return self._shared.lock

    def is_present(self, place: int) -> bool:
        """Tell whether a rank still takes part."""
        return not self._has_left(place)
