"""Sharing: opens memory that the ranks of one host share.

threads of a process     the object itself, by a name
processes                a file in memory that all map, known by its path until all have it
processes under MPI      a window of MPI's

The locks of processes are in a file of their own, one for all memories of a stream.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Final

import numpy as np

from ..vector import Array
from .node_memory import FileLocks, FileMemory, NodeMemory, ThreadMemory, ThreadRegion
from .transport import Transport

_FOLDER: Final = Path("/dev/shm")  # files there are memory
_PROCESS: Final = uuid.uuid4().hex  # in containers that share memory several may have one pid
_in_this_process: weakref.WeakValueDictionary[str, ThreadRegion] = weakref.WeakValueDictionary()
_locks: weakref.WeakKeyDictionary[Transport, FileLocks] = weakref.WeakKeyDictionary()


def open_shared_memory(stream: Transport, size_bytes: int) -> NodeMemory:
    """Return new zeros that a stream's ranks map, as `Transport.shared_memory`."""
    processes = stream.gather_object(f"{os.getpid()} {_PROCESS}")  # forks have the latter
    if len({*processes}) == 1:
        return share_in_process(stream, size_bytes)
    return share_by_file(stream, size_bytes)


def share_in_process(stream: Transport, size_bytes: int) -> ThreadMemory:
    """Return memory of a stream's ranks, which are threads of this process."""
    made = ThreadRegion(size_bytes) if stream.rank == 0 else None
    name = uuid.uuid4().hex
    if made is not None:
        # Entered before the name is known to anybody.
        _in_this_process[name] = made
    shared = _in_this_process[stream.broadcast_object(name)]
    stream.barrier()  # the first rank keeps it until all have it

    def has_left(place: int) -> bool:
        return stream.ranks[place] in stream.departures()

    return ThreadMemory(shared, stream.rank, stream.size, has_left)


def share_by_file(stream: Transport, size_bytes: int, memory: Array | None = None) -> FileMemory:
    """Return memory of a stream's ranks, which are processes of one host.

    memory: what they share already; None: a file in memory is mapped by each.
    Raises OSError, on every rank, where there is no room for it.
    """
    if stream not in _locks:
        _locks[stream] = FileLocks(_open_file(stream, 0), stream.rank, stream.size)
        stream.barrier()  # all are present
    locks = _locks[stream]
    number = next(locks.memories)  # before anything fails, so that it stays equal on all ranks
    if memory is None:
        file = _open_file(stream, size_bytes)
        try:
            mapped = mmap.mmap(file, size_bytes) if size_bytes else b""
        finally:
            os.close(file)  # a map has its own
        memory = np.frombuffer(mapped, np.uint8)
    return FileMemory(memory, locks, number, stream.timeout_seconds)


def _open_file(stream: Transport, size_bytes: int) -> int:
    """Return a new file of zeros that a stream's ranks have all opened, and nobody else can."""
    made = _make_file(size_bytes) if stream.rank == 0 else (-1, "")
    # A failure travels in the path's place: all ranks raise, and none waits in the barrier.
    told: str = stream.broadcast_object(made[1])
    if told.startswith("!"):
        raise OSError(f"the ranks of a host must share {size_bytes:,} bytes: {told[1:]}")
    file = made[0] if stream.rank == 0 else os.open(told, os.O_RDWR)
    try:
        stream.barrier()  # all have opened it
    except BaseException:
        os.close(file)
        raise
    finally:
        # Unlinked once all have it: the memory goes with the last process, however that ends.
        if stream.rank == 0:
            os.unlink(told)
    return file


def _make_file(size_bytes: int) -> tuple[int, str]:
    """Return a new file and its path; where that fails, "!" and why."""
    folder = _FOLDER if os.access(_FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    try:
        file, path = tempfile.mkstemp(prefix="gtopk-", dir=folder)
    except OSError as error:
        return -1, f"!{error}"
    try:
        if size_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size_bytes)  # now, not as a SIGBUS later
        elif size_bytes:  # macOS
            os.ftruncate(file, size_bytes)
    except OSError as error:
        os.close(file)
        os.unlink(path)
        return -1, f"!{error.strerror} in {folder}; free or enlarge it (docker run --shm-size=...)"
    return file, path
