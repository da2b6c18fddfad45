"""The transport of threads in one process: tests, teaching, and the world of a single rank."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from ..errors import CollectiveError, PeerError, PeerTimeoutError
from ..vector import Array
from .transport import Transport

T = TypeVar("T")
_LOOK_SECONDS = 0.02  # how often a waiting rank looks whether its peer has left


class _Meeting:
    """What the ranks of one local world share."""

    def __init__(self, size: int) -> None:
        self.boxes: dict[tuple[int, int], queue.SimpleQueue[Array]] = {
            (source, to): queue.SimpleQueue() for source in range(size) for to in range(size)
        }
        self.left: dict[int, tuple[int, str]] = {}


class LocalTransport(Transport):
    """One rank of a world of threads; messages are copied, as a network would."""

    name = "local"

    def __init__(self, rank: int, size: int, meeting: _Meeting, timeout_seconds: float) -> None:
        super().__init__(rank, size)
        self._meeting = meeting
        self._left = meeting.left
        self._timeout_seconds = timeout_seconds

    def send(self, message: Array, to: int) -> Callable[[], None]:
        self.traffic.sent_bytes += message.size
        self.traffic.sent_messages += 1
        self._meeting.boxes[self.rank, to].put(np.array(message))
        return lambda: None

    def receive(self, source: int) -> Array:
        begun = time.monotonic()
        try:
            return self._receive(source, begun + self._timeout_seconds)
        finally:
            self.traffic.wait_seconds += time.monotonic() - begun

    def _receive(self, source: int, deadline: float) -> Array:
        box = self._meeting.boxes[source, self.rank]
        while True:
            # Read before the look into the box: whoever leaves has sent all it will ever send.
            missing = self._missing(source)
            try:
                return box.get(timeout=0 if missing else _LOOK_SECONDS)
            except queue.Empty:
                pass
            if missing:
                raise PeerError(missing)
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"rank {self.rank} waited {self._timeout_seconds:g} s for rank {source} "
                    f"in {self._activity}"
                )

    def resign(self, reason: str) -> None:
        self._left.setdefault(self.rank, (self._completed, reason))

    def collect_resignations(self) -> None:
        """Do nothing: `_left` is shared by all ranks."""

    def abort(self, exit_code: int) -> None:
        os._exit(exit_code)

    def neighbours(self) -> list[int]:
        return list(range(self.size))

    def library(self) -> str:
        return "threads of one process"


def local_world(size: int, timeout_seconds: float = 60.0) -> list[LocalTransport]:
    """Return the transports of a world of `size` ranks in this process, one for each thread."""
    if size < 1:
        raise ValueError(f"a world needs at least one rank, got size {size}")
    meeting = _Meeting(size)
    return [LocalTransport(rank, size, meeting, timeout_seconds) for rank in range(size)]


def run_ranks(
    transports: Sequence[LocalTransport], program: Callable[[LocalTransport], T]
) -> list[T]:
    """Run `program(transport)` on every rank, each in a thread; return the results by rank.

    When a rank raises, the others find it gone; the exception that came first is raised here.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def rank(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = program(transport)
        except BaseException as error:
            errors.append(error)
            transport.resign(f"it raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=rank, args=(t,), daemon=True) for t in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # What a rank raised itself says more than its peers' errors about its absence.
        raise min(errors, key=lambda error: isinstance(error, CollectiveError))
    return [results[transport.rank] for transport in transports]
