"""The transport of threads in one process: tests, teaching, and the world of a single rank."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from ..errors import CollectiveError, PeerError, PeerTimeoutError
from ..vector import Array
from .carrier import Carrier
from .farewell import Farewell
from .transport import Transport

T = TypeVar("T")

# What a rank sent another on a stream. None is no message: it wakes who waits, as somebody left.
_Box = queue.SimpleQueue["Array | None"]


class _Meeting:
    """What the ranks of one local world share."""

    def __init__(self) -> None:
        self.left: dict[int, Farewell] = {}
        self._boxes: dict[tuple[int, int, int], _Box] = {}
        self._waited_for: dict[_Box, None] = {}

    def box(self, tag: int, source: int, to: int) -> _Box:
        key = tag, source, to
        try:
            return self._boxes[key]
        except KeyError:
            return self._boxes.setdefault(key, queue.SimpleQueue())

    @contextmanager
    def waiting_for(self, box: _Box) -> Iterator[None]:
        """Wake who waits for this box when a rank leaves."""
        self._waited_for[box] = None
        try:
            yield
        finally:
            del self._waited_for[box]

    def leave(self, rank: int, farewell: Farewell) -> None:
        self.left.setdefault(rank, farewell)
        for box in self._waited_for.copy():
            box.put(None)


class LocalTransport(Carrier):
    """One rank of a world of threads; messages are copied, as a network would."""

    name = "local"

    def __init__(self, rank: int, size: int, meeting: _Meeting, timeout_seconds: float) -> None:
        super().__init__(rank, size)
        self._meeting = meeting
        self._left = meeting.left
        self._timeout_seconds = timeout_seconds

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        stream.traffic.count(message.size)
        self._meeting.box(stream.tag, self.rank, to).put(np.array(message))
        return _nothing

    def receive_on(self, stream: Transport, source: int) -> Array:
        begun = time.monotonic()
        box = self._meeting.box(stream.tag, source, self.rank)
        try:
            with self._meeting.waiting_for(box):
                return self._receive(box, stream, source, begun + self._timeout_seconds)
        finally:
            stream.traffic.count_wait(time.monotonic() - begun)

    def _receive(self, box: _Box, stream: Transport, source: int, deadline: float) -> Array:
        while True:
            # Read before the look into the box: whoever leaves has sent all it will ever send.
            missing = stream.missing(source)
            remaining = max(0.0, deadline - time.monotonic())
            try:
                message = box.get(timeout=0 if missing else remaining)
            except queue.Empty:
                if missing:
                    raise PeerError(missing) from None
                raise PeerTimeoutError(
                    f"rank {self.rank} waited {self._timeout_seconds:g} s for rank {source} "
                    f"in {stream.activity}"
                ) from None
            if message is not None:
                return message

    def resign(self, reason: str) -> None:
        self._meeting.leave(self.rank, self.farewell(reason))

    def collect_farewells(self) -> None:
        """Do nothing: `_left` is shared by all ranks."""

    def abort(self, exit_code: int) -> None:
        os._exit(exit_code)

    def neighbours(self) -> list[int]:
        return list(range(self.size))

    def library(self) -> str:
        return "threads of one process"


def _nothing() -> None:
    """Wait for nothing: what was sent has been copied."""


def local_world(size: int, timeout_seconds: float = 60.0) -> list[LocalTransport]:
    """Return the transports of a world of `size` ranks in this process, one for each thread."""
    if size < 1:
        raise ValueError(f"a world needs at least one rank, got size {size}")
    meeting = _Meeting()
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
