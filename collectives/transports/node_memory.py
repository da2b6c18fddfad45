"""Shared memory: bytes shared by the ranks of one host, a lock on them, and the ranks' presence.

Locks and presence are byte-range locks on a file, which the kernel frees however a process ends.
So a killed rank blocks no other, and its end is known at once. All memories of the same ranks share
one such file, because a rank that frees a memory is still alive:

    offset in the lock file    held by
    place                      the rank at that place, as long as it lives
    ranks + number             the rank that holds the lock of the memory with that number

`open_shared_memory` opens the memory itself:

    threads in a process     the object itself, found by name
    processes                a memory file that all map, found by path until all have it
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from ..errors import PeerTimeoutError
from ..vector import Array
from .counters import NodeMemory
from .transport import Transport

_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 2e-6, 1e-3


class FileLocks:
    """The processes' lock file, and this process's presence in it.

    ranks: their world ranks, by place.
    file:  open for reading and writing; closed with this object. Do not map it: a map closes a
           descriptor of its own, and closing any descriptor of the file in this process frees its
           locks.
    """

    def __init__(self, file: int, place: int, ranks: Sequence[int]) -> None:
        self.place, self.ranks = place, ranks
        self.memories = itertools.count()  # numbers for memories
        self._file = file
        self._gone: set[int] = set()
        # Not at exit: the rank counts as present until the process ends.
        weakref.finalize(self, os.close, file).atexit = False
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives."""
        if place == self.place:
            return True
        # A shared lock, so that two ranks checking at once do not mistake each other for presence.
        if place not in self._gone and self.try_lock(place, fcntl.LOCK_SH):
            self.release(place)
            self._gone.add(place)
        return place not in self._gone

    def try_lock(self, offset: int, kind: int = fcntl.LOCK_EX) -> bool:
        """Lock a byte; return False if another process has locked it."""
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, offset)
        # Systems may answer with either.
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, offset: int) -> None:
        """Unlock a byte."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)


class FileMemory:
    """Memory shared by processes on a node; number: from `locks.memories`, equal on all."""

    def __init__(self, memory: Array, locks: FileLocks, number: int, seconds: float) -> None:
        self.bytes = memory
        self.place, self.places = locks.place, len(locks.ranks)
        self._locks = locks
        self._offset = self.places + number
        self._timeout_seconds = seconds
        self._thread_lock = threading.Lock()  # the kernel's locks are per process

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Enter as the only rank."""
        with self._thread_lock:
            self._acquire()
            try:
                yield
            finally:
                self._locks.release(self._offset)

    def _acquire(self) -> None:
        """Lock; wait for a frozen holder no longer than for any peer."""
        deadline = time.monotonic() + self._timeout_seconds
        pause_seconds = _SHORTEST_SLEEP_SECONDS
        # Poll, as the kernel's own wait for a lock has no timeout.
        while not self._locks.try_lock(self._offset):
            if time.monotonic() > deadline:
                ranks = self._locks.ranks
                raise PeerTimeoutError(
                    f"rank {ranks[self.place]} has waited {self._timeout_seconds:g} s for the "
                    f"memory that ranks {list(ranks)} share: the rank that has locked it is frozen"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_SLEEP_SECONDS)

    def is_present(self, place: int) -> bool:
        """Tell whether a rank's process lives."""
        return self._locks.is_present(place)


class ThreadMemory:
    """Memory shared by threads in one process, as seen by one of them."""

    def __init__(
        self, stream: Transport, memory: Array, lock: AbstractContextManager[object]
    ) -> None:
        self.bytes = memory
        self.place, self.places = stream.rank, stream.size
        self._stream = stream
        self._lock = lock

    def lock(self) -> AbstractContextManager[object]:
        """Enter as the only rank."""
        return self._lock

    def is_present(self, place: int) -> bool:
        """Tell whether a rank still takes part."""
        return self._stream.ranks[place] not in self._stream.departures()


COUNTER_BYTES: Final = 8


class MemoryCounter:
    """A number in COUNTER_BYTES of memory shared by the ranks of a host."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self._number = memory.bytes.view(np.int64)

    def add(self, amount: int) -> int:
        """Add, and return the number before that."""
        with self._memory.lock():
            before = int(self._number[0])
            self._number[0] = before + amount
        return before


_FOLDER: Final = Path("/dev/shm")  # its files are in memory
_PROCESS: Final = uuid.uuid4().hex  # containers that share memory may have processes with equal pid
_thread_memories: weakref.WeakValueDictionary[str, ThreadMemory] = weakref.WeakValueDictionary()
_locks: weakref.WeakKeyDictionary[Transport, FileLocks] = weakref.WeakKeyDictionary()


def open_shared_memory(stream: Transport, size_bytes: int) -> NodeMemory:
    """Return new zeros that a stream's ranks map; like `Transport.shared_memory`."""
    if len(stream.neighbours()) < stream.size:
        raise ValueError(f"the ranks {list(stream.ranks)} are not all on one host")
    processes = stream.gather_object(f"{os.getpid()} {_PROCESS}")  # forks share _PROCESS
    if len({*processes}) == 1:
        return share_in_process(stream, size_bytes)
    return share_by_file(stream, size_bytes)


def share_in_process(stream: Transport, size_bytes: int) -> ThreadMemory:
    """Return memory for a stream's ranks, which are threads in this process."""
    name, own_memory = uuid.uuid4().hex, None
    if stream.rank == 0:
        # A map is page-aligned, as `NodeMemory.bytes` promises, and cannot have 0 bytes.
        memory = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)[:size_bytes]
        # Store it before anybody learns the name.
        own_memory = _thread_memories[name] = ThreadMemory(stream, memory, threading.Lock())
    first = _thread_memories[stream.broadcast_object(name)]
    own = own_memory or ThreadMemory(stream, first.bytes, first.lock())
    stream.barrier()  # the first rank keeps its reference until all have theirs
    return own


def share_by_file(stream: Transport, size_bytes: int) -> FileMemory:
    """Return memory for a stream's ranks, which are processes on one host.

    Raises OSError on every rank if there is no room for it, or a rank cannot open it.
    """
    if stream not in _locks:
        _locks[stream] = FileLocks(_open_file(stream, 0), stream.rank, stream.ranks)
        stream.barrier()  # all are present
    locks = _locks[stream]
    number = next(locks.memories)  # before anything can fail, to stay equal on all ranks
    file = _open_file(stream, size_bytes)
    try:
        mapped = mmap.mmap(file, size_bytes) if size_bytes else b""
    finally:
        os.close(file)  # the map has its own descriptor
    return FileMemory(np.frombuffer(mapped, np.uint8), locks, number, stream.timeout_seconds)


def _open_file(stream: Transport, size_bytes: int) -> int:
    """Return a new file of zeros that all of a stream's ranks have opened, and nobody else can."""
    created = _make_file(size_bytes) if stream.rank == 0 else (-1, "")
    # A failure is sent instead of the path, so that all ranks raise and none waits in the barrier.
    path: str = stream.broadcast_object(created[1])
    if path.startswith("!"):
        raise OSError(f"the ranks of a host must share {size_bytes:,} bytes: {path[1:]}")
    file, problem = created[0], ""
    if stream.rank != 0:
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:  # e.g. in containers, each with its own /dev/shm
            problem = f"rank {stream.ranks[stream.rank]} cannot open it: {error}"
    try:
        # All ranks have opened it, or learn here which one could not.
        if found := next(filter(None, stream.gather_object(problem)), ""):
            raise OSError(
                f"the ranks of a host must share {size_bytes:,} bytes, made by rank "
                f"{stream.ranks[0]}: {found}; let them see one {Path(path).parent}, as one user"
            )
    except BaseException:
        if file >= 0:
            os.close(file)
        raise
    finally:
        # Unlink once all have it: the memory goes away with the last process, however that ends.
        if stream.rank == 0:
            os.unlink(path)
    return file


def _make_file(size_bytes: int) -> tuple[int, str]:
    """Return a new file and its path; on failure, "!" and the reason."""
    folder = _FOLDER if os.access(_FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    try:
        file, path = tempfile.mkstemp(prefix="gtopk-", dir=folder)
    except OSError as error:
        return -1, f"!{error}"
    try:
        if size_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size_bytes)  # fail now, not with SIGBUS later
        elif size_bytes:  # macOS
            os.ftruncate(file, size_bytes)
    except OSError as error:
        os.close(file)
        os.unlink(path)
        return -1, f"!{error.strerror} in {folder}; free or enlarge it (docker run --shm-size=...)"
    return file, path
