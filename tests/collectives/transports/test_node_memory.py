"""Memory shared by a host's ranks outlives each of them."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import PeerError, PeerTimeoutError, Transport
from collectives.transports import LocalTransport
from collectives.transports.node_memory import FileLocks, FileMemory, _open_file, share_by_file


def open_memory(path: str, place: int, seconds: float = 30.0) -> FileMemory:
    locks = FileLocks(os.open(path, os.O_RDWR), place, (4, 7))
    return FileMemory(np.empty(0, np.uint8), locks, 0, seconds)


def is_held_open(path: str) -> bool:
    """Tell whether this process has the file open, wherever it was moved or removed since."""
    held = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread may close its own meanwhile
            held.append(os.readlink(each))
    return any(name.startswith(path) for name in held)


@contextmanager
def holder(path: str) -> Iterator[int]:
    """Yield the number of a process at place 1 that holds the lock."""
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        with open_memory(path, 1).lock():
            os.write(tell, b"!")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(tell)


def test_killed_rank_is_absent_and_releases_the_lock() -> None:
    with tempfile.NamedTemporaryFile() as file:
        memory = open_memory(file.name, 0)
        assert not memory.is_present(1)  # nobody has been there
        memory = open_memory(file.name, 0)
        with holder(file.name):
            assert memory.is_present(1)
        assert not memory.is_present(1)
        assert memory.is_present(0)
        with memory.lock():
            pass


def test_waiting_for_the_lock_of_a_frozen_rank_times_out() -> None:
    with tempfile.NamedTemporaryFile() as file, holder(file.name):
        memory = open_memory(file.name, 0, seconds=0.05)
        text = r"rank 4 has waited 0\.05 s for the memory that ranks \[4, 7\] share"
        with pytest.raises(PeerTimeoutError, match=text), memory.lock():
            pass


def test_full_memory_raises_on_every_rank(
    threads: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)

    def program(transport: LocalTransport) -> None:
        stream: Transport = transport
        with pytest.raises(OSError, match="must share 100 bytes: No space left on device in"):
            share_by_file(stream, 100)

    threads(2, program)


def test_rank_that_cannot_open_the_file_is_named_on_every_rank(
    threads: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = tempfile.mkstemp

    def make_elsewhere(prefix: str, dir: Path) -> tuple[int, str]:
        file, path = make(prefix=prefix, dir=dir)
        made.append(path)
        os.rename(path, f"{path}-elsewhere")
        return file, path

    monkeypatch.setattr(tempfile, "mkstemp", make_elsewhere)
    monkeypatch.setattr(os, "unlink", lambda path: os.remove(f"{path}-elsewhere"))

    def program(transport: LocalTransport) -> None:
        stream: Transport = transport
        text = "made by rank 0: rank 1 cannot open it: .*No such file.*; let them see one /"
        with pytest.raises(OSError, match=text):
            share_by_file(stream, 100)

    threads(3, program)
    (path,) = made
    assert not is_held_open(path)


def test_memory_is_shared_without_reservation_off_linux(
    threads: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")

    def program(transport: LocalTransport) -> int:
        stream: Transport = transport
        return share_by_file(stream, 100).bytes.nbytes

    assert threads(2, program) == [100, 100]


def test_file_is_removed_when_a_rank_dies_before_all_opened_it():
    paths = []

    def broadcast(path: str) -> str:
        paths.append(path)
        return path

    def fail_gather(problem: str) -> None:
        raise PeerError("rank 1 left")

    stream = SimpleNamespace(rank=0, size=2, broadcast_object=broadcast, gather_object=fail_gather)
    with pytest.raises(PeerError):
        _open_file(stream, 100)
    assert not os.path.exists(paths[0])
    assert not is_held_open(paths[0])
