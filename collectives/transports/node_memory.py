"""NodeMemory: bytes that the ranks of one host share, a lock on them, and the ranks' presence.

Locks and presence are locks on a file's byte ranges, which the kernel frees when a process ends in
any way. So a killed rank blocks no other, and is known to be gone at once. All memories of the same
ranks share one such file, as a rank that frees a memory is still alive:

    offset in the lock file    who locks it
    place                      the rank at that place, for as long as it lives
    ranks + number             the rank that holds the lock of the memory with that number
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np

from ..errors import PeerTimeoutError
from ..vector import Array

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
        """Enter as the only rank; a rank that dies inside releases it. It is not reentrant."""

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives; once it does not, it never will."""


class FileLocks:
    """The lock file of processes, and the presence of this one.

    file: open for reading and writing, and closed with this object. It must not be mapped: closing
          any descriptor of it in this process frees its locks, and a map closes one of its own.
    """

    def __init__(self, file: int, place: int, places: int) -> None:
        self.place, self.places = place, places
        self.memories = itertools.count()  # their numbers
        self._file = file
        self._gone: set[int] = set()
        # Not at exit: the rank counts as present until the process ends.
        weakref.finalize(self, os.close, file).atexit = False
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives."""
        if place == self.place:
            return True
        # Shared: of two ranks that ask at once, neither takes the other's lock for a presence.
        if place not in self._gone and self.try_lock(place, fcntl.LOCK_SH):
            self.release(place)
            self._gone.add(place)
        return place not in self._gone

    def try_lock(self, offset: int, kind: int = fcntl.LOCK_EX) -> bool:
        """Lock a byte; False where another process has locked it."""
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, offset)
        # A system may answer with either of the two.
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, offset: int) -> None:
        """Unlock a byte."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)


class FileMemory:
    """Memory that processes of a node share; number: drawn from `locks.memories`, equal on all."""

    def __init__(self, memory: Array, locks: FileLocks, number: int, seconds: float) -> None:
        self.bytes = memory
        self.place, self.places = locks.place, locks.places
        self._locks = locks
        self._offset = locks.places + number
        self._timeout_seconds = seconds
        self._of_threads = threading.Lock()  # the kernel's locks are per process

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Enter as the only rank."""
        with self._of_threads:
            self._acquire()
            try:
                yield
            finally:
                self._locks.release(self._offset)

    def _acquire(self) -> None:
        """Lock; a holder that is frozen is waited for no longer than any peer is."""
        deadline = time.monotonic() + self._timeout_seconds
        pause_seconds = _SHORTEST_SLEEP_SECONDS
        # Polled, as the kernel's own wait for a lock has no timeout.
        while not self._locks.try_lock(self._offset):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"the memory of this host's {self.places} ranks has been locked for "
                    f"{self._timeout_seconds:g} s: one of them is frozen; place {self.place} waits"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_SLEEP_SECONDS)

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives."""
        return self._locks.is_present(place)


class ThreadRegion:
    """The state that the threads of a process share."""

    def __init__(self, size_bytes: int) -> None:
        # A map begins at a page, as `NodeMemory.bytes` promises, and cannot have 0 bytes.
        self.bytes: Array = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)[:size_bytes]
        self.lock = threading.Lock()


class ThreadMemory:
    """Memory of the threads of one process.

    has_left: tells of a place whether its rank takes part no more.
    """

    def __init__(
        self, shared: ThreadRegion, place: int, places: int, has_left: Callable[[int], bool]
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
