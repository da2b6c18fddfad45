"""Fixtures: recorded messages, a modelled machine with GPUs, a C++ core built with sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from collectives.transports import LocalTransport, local_world
from tests.collectives import fake_cuda

ROOT = Path(__file__).parents[2]


class Event(NamedTuple):
    """One rank sent a message to its peer, or received one from it."""

    kind: str  # "to" or "from"
    peer: int
    message: np.ndarray


class Witness:
    """A local world that records the events of each rank in order."""

    def __init__(self, size: int) -> None:
        self.world = local_world(size, timeout_seconds=30)
        self.events: list[list[Event]] = [[] for _ in range(size)]
        for transport in self.world:
            self._watch(transport)

    def _watch(self, transport: LocalTransport) -> None:
        events, send, receive = self.events[transport.rank], transport.send, transport.receive

        def watched_send(message: np.ndarray, to: int) -> Callable[[], None]:
            events.append(Event("to", to, message.copy()))
            return send(message, to)

        def watched_receive(source: int) -> np.ndarray:
            message = receive(source)
            events.append(Event("from", source, message.copy()))
            return message

        transport.send, transport.receive = watched_send, watched_receive

    def schedule(self, rank: int) -> list[tuple[str, int]]:
        """Return a rank's events in order: ("to", peer) and ("from", peer)."""
        return [(event.kind, event.peer) for event in self.events[rank]]

    def rounds(self) -> list[list[np.ndarray]]:
        """Return the messages of each round.

        In a round a rank sends at most one message and receives at most one. It forwards a received
        message only in a later round.
        """
        size = len(self.world)
        ready, sent, received = [0] * size, [-1] * size, [-1] * size
        todo = [deque(events) for events in self.events]
        flying: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        by_round: dict[int, list[np.ndarray]] = defaultdict(list)
        while any(todo):
            for rank, events in enumerate(todo):
                while events and (events[0].kind == "to" or flying[events[0].peer, rank]):
                    kind, peer, message = events.popleft()
                    if kind == "to":
                        sent[rank] = max(ready[rank], sent[rank] + 1)
                        flying[rank, peer].append(sent[rank])
                    else:
                        received[rank] = max(flying[peer, rank].popleft(), received[rank] + 1)
                        ready[rank] = received[rank] + 1
                        by_round[received[rank]].append(message)
        return [by_round[number] for number in range(len(by_round))]


@pytest.fixture
def witness() -> Callable[[int], Witness]:
    """Return a function that creates a `Witness` for a number of ranks."""
    return Witness


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.Cuda]:
    """A modelled machine with 8 GPUs; the test fails if the model detects an error."""
    cuda = fake_cuda.Cuda(gpus=8)
    fake_cuda.install(monkeypatch, cuda)
    yield cuda
    cuda.off.set()
    cuda.change()
    assert cuda.misuses == []


@pytest.fixture(scope="session")
def sanitized(shared_folder: Path) -> Callable[..., str]:
    """Return `sanitized(program, *arguments)`: its output on a C++ core with sanitizers."""
    folder = shared_folder / "sanitized"
    programs = ROOT / "tests" / "programs"

    def run(program: str, *arguments: str) -> str:
        job = subprocess.run(
            [
                *(sys.executable, str(programs / "sanitized.py")),
                *(str(folder), str(programs / program), *arguments),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=170,
        )
        if job.returncode == 77:
            pytest.skip("needs g++ and its sanitizers")
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    return run
