"""Where the simulated ranks run, and how they exchange.

    gtopk simulate                  all ranks in this process, as threads during an exchange
    mpirun -n 4 gtopk simulate      one rank per process; they exchange over the real transport

Every process follows the same simulated clock: it computes times, sizes and the order of ranks from
numbers that are equal everywhere. A rank's gradients travel in the training's collectives, its
other numbers through `broadcast`.
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
        text = record.getMessage()
        if record.module == "stragglers" or text in seen_lines:
            return False
        seen_lines.add(text)
        return True

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


T = TypeVar("T")
_CHANNEL: Final = 0
# Long, because a thread that computes for a long time has not failed.
_TIMEOUT_SECONDS: Final = 3600.0


class Threads:
    """All ranks, as threads of this process.

    here: the ranks with models in this process.
    """

    def __init__(self, size: int) -> None:
        self.here: Sequence[int] = range(size)

    def train(self, script: Callable[[], T]) -> T:
        """Run a training script on every rank, each in its own world; return rank 0's result.

        `Processes` returns the result of its own rank instead.
        """

        def rank(transport: LocalTransport) -> T:
            with world.entered(transport):
                return script()

        return run_ranks(_threads(len(self.here)), rank)[0]

    def run_on(self, members: Sequence[int], program: Callable[[Transport], T]) -> dict[int, T]:
        """Run `program(transport)` on some ranks; return the results of this process's, by rank."""
        return dict(zip(members, run_ranks(_threads(len(members)), program), strict=True))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast a contiguous CPU tensor in place from `root`; a no-op in a single process."""


def _threads(size: int) -> list[LocalTransport]:
    """Return a world that does not report long waits, because its time is simulated."""
    return local_world(size, _TIMEOUT_SECONDS, announces_waits=False)


class Processes:
    """One rank in each process of this world; they exchange on a channel of their own."""

    def __init__(self, here: World) -> None:
        self.here: Sequence[int] = [here.rank]
        self.size = here.size
        # A separate channel, as the engine's thread may exchange at any time.
        self._transport = here.transport.channel(_CHANNEL)

    def train(self, script: Callable[[], T]) -> T:
        return script()

    def run_on(self, members: Sequence[int], program: Callable[[Transport], T]) -> dict[int, T]:
        (rank,) = self.here
        if rank not in members:
            return {}
        transport = self._transport.subset(members)
        with transport.operation("a simulated exchange"):
            return {rank: program(transport)}

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        values = tensor.numpy()
        with self._transport.operation("a simulated rank's broadcast"):
            message = values.reshape(-1).view(np.uint8) if self.here == [root] else None
            received = self._transport.broadcast(message, root)
        # Write in place: the caller owns the tensor.
        values[...] = received.view(values.dtype).reshape(values.shape)


Ranks = Threads | Processes


def processes_launched() -> Processes | None:
    """Return the `Processes` of a launcher's job; None if this process is the only one."""
    job = launched_by()
    if job is None or job.size == 1:
        return None
    # The links are modelled, so do not measure this machine's.
    os.environ[settings.ADVICE.name] = "off"
    world.init()
    return Processes(world.current())
