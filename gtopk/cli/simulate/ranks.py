"""Ranks: who computes the simulated ones, and how they meet.

    gtopk simulate                  all of them here; each a thread while they exchange
    mpirun -n 4 gtopk simulate      one in each process, which exchange over the real transport

Every process follows the same simulated clock: seconds, sizes and who is next are computed from
numbers that are equal everywhere. A rank's gradients, which only it knows, travel in the training's
collectives; its other numbers by `broadcast`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
import torch

from collectives.transports import LocalTransport, Transport, local_world, run_ranks

from ... import settings
from ...runtime.launch import launched_by
from ...runtime.world import world
from ...runtime.world.membership import World


@contextlib.contextmanager
def filtered_logs() -> Iterator[None]:
    """Drop repeated messages, and those about stragglers: simulated ranks share these cores."""
    logger = logging.getLogger("gtopk")
    seen_lines: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if record.module == "stragglers" or said in seen_lines:
            return False
        seen_lines.add(said)
        return True

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


T = TypeVar("T")
_CHANNEL: Final = 0
# A thread that computes for long has not failed.
_TIMEOUT_SECONDS: Final = 3600.0


class Threads:
    """All ranks, in this process.

    here: those whose models it holds.
    """

    def __init__(self, size: int) -> None:
        self.here: Sequence[int] = range(size)

    def train(self, script: Callable[[], T]) -> T:
        """Run a training script on every rank, each in its world; return the result of rank 0.

        Of several processes each returns that of its own rank.
        """

        def rank(transport: LocalTransport) -> T:
            with world.entered(transport):
                return script()

        return run_ranks(_threads(len(self.here)), rank)[0]

    def meet(self, members: Sequence[int], program: Callable[[Transport], T]) -> dict[int, T]:
        """Run `program(transport)` on these ranks; return the results of those here, by rank."""
        return dict(zip(members, run_ranks(_threads(len(members)), program), strict=True))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill a tensor, contiguous and on the CPU, with what it is on one rank: as it is here."""


def _threads(size: int) -> list[LocalTransport]:
    """Return a world whose waits say nothing: its seconds are simulated."""
    return local_world(size, _TIMEOUT_SECONDS, announces_waits=False)


class Processes:
    """One rank in each process of this world; they meet beside its own operations."""

    def __init__(self, here: World) -> None:
        self.here: Sequence[int] = [here.rank]
        self.size = here.size
        # Apart from the engine's messages: its thread may exchange at any time.
        self._transport = here.transport.channel(_CHANNEL)

    def train(self, script: Callable[[], T]) -> T:
        return script()

    def meet(self, members: Sequence[int], program: Callable[[Transport], T]) -> dict[int, T]:
        (rank,) = self.here
        if rank not in members:
            return {}
        transport = self._transport.subset(members)
        with transport.operation("a simulated exchange"):
            return {rank: program(transport)}

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        values = tensor.numpy()
        with self._transport.operation("a simulated rank's word"):
            message = values.reshape(-1).view(np.uint8) if self.here == [root] else None
            received = self._transport.broadcast(message, root)
        # In place, as the tensor is the caller's.
        values[...] = received.view(values.dtype).reshape(values.shape)


Ranks = Threads | Processes


def processes_launched() -> Processes | None:
    """Return this process among those that a launcher started; None where it is the only one."""
    job = launched_by()
    if job is None or job.size == 1:
        return None
    # The links are modelled: those of this machine need not be measured.
    os.environ[settings.ADVICE.name] = "off"
    world.init()
    return Processes(world.current())
