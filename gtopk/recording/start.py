"""How a world's recording starts and ends."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from collectives.cores import usable_cores
from collectives.transports import Transport

from .. import __version__
from ..engine.clocks import Offset
from ..machine import processor
from ..settings import MLFLOW, PROMETHEUS, RUN, TENSORBOARD, WANDB
from .endpoint import Address, Endpoint
from .files import LineFile
from .lines import FORMAT, Line, path_of
from .rank_file import has_ended
from .recorder import Recorder, Sink
from .scalars import Scalars
from .settings import Settings
from .trackers import MLflow, Wandb

_log = logging.getLogger("gtopk")
_written: Final[set[Path]] = set()


class Recorded(Protocol):
    """A world, as far as its recording goes."""

    recorder: Recorder | None
    recordings: Settings
    recorded_to: set[str]
    resumed: bool
    step: int
    clock: Offset
    began_unix_seconds: float

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def transport(self) -> Transport: ...


def start(world: Recorded, settings: Settings, own: Sequence[Sink] = ()) -> None:
    """Record what this rank does from now on; a recording that goes on ends.

    own: the script's sinks.
    Raises OSError where a file or an endpoint cannot be opened, ImportError where a package that is
    asked for is not installed.
    """
    stop(world, "it is recorded elsewhere from now on")
    _tell_of_earlier_run(world, settings)
    with ExitStack() as opened:  # where a later one cannot be, the earlier ones are closed
        sinks = []
        for opening in _openings(world, settings).values():
            sinks.append(opening())
            opened.callback(sinks[-1].close)
        opened.pop_all()
    world.recordings = settings
    _record(world, [*sinks, *own])


def start_if_asked(world: Recorded) -> None:
    """Record what was asked for at the world's start; where that cannot be, say so and train."""
    _tell_of_earlier_run(world, world.recordings)
    sinks = []
    for variable, opening in _openings(world, world.recordings).items():
        try:
            sinks.append(opening())
        except Exception as error:  # of whatever kind theirs raise
            _log.warning("rank %d trains without what %s asks for: %s", world.rank, variable, error)
    _record(world, sinks)


def _openings(world: Recorded, settings: Settings) -> dict[str, Callable[[], Sink]]:
    """Return how to open what is asked for, by the variable that does."""
    found: dict[str, Callable[[], Sink]] = {}
    if settings.run:
        found[RUN.name] = partial(LineFile, path_of(settings.run, world.rank))
    if settings.prometheus is not None:
        host, port = settings.prometheus
        address = Address(host, port + world.local_rank if port else 0)
        found[PROMETHEUS.name] = partial(Endpoint, address, world.rank)
    of_rank_0: dict[str, tuple[str, Callable[[str], Sink]]] = {
        TENSORBOARD.name: (settings.tensorboard, Scalars),
        WANDB.name: (settings.wandb, Wandb),
        MLFLOW.name: (settings.mlflow, MLflow),
    }
    for variable, (where, opening) in of_rank_0.items():
        if where and world.rank == 0:
            found[variable] = partial(opening, where)
    return found


def _tell_of_earlier_run(world: Recorded, settings: Settings) -> None:
    """Say, on rank 0, that a folder holds a run that is over; not of what this process wrote."""
    path = path_of(settings.run, world.rank) if settings.run else None
    if world.rank or world.resumed or path is None or path in _written:
        return
    _written.add(path)
    if has_ended(path):
        _log.info(
            "'%s' holds the record of an earlier run; this one is added, and `gtopk report` shows "
            "the last: give each run a folder of its own to see both",
            settings.run,
        )


def _record(world: Recorded, sinks: list[Sink]) -> None:
    if sinks:
        began, every = time.perf_counter(), world.recordings.every
        world.recorder = Recorder(sinks, _begin(world, began), began, every, lambda: world.step)
        world.recorded_to.add(world.recordings.run)
        if world.resumed:
            world.recorder.note_resumed()


def stop(world: Recorded, how: str, in_order: bool = True) -> None:
    """Write how this rank ends, and nothing more."""
    if world.recorder is not None:
        world.recorder.end(how, in_order)
    pause(world)


def pause(world: Recorded) -> None:
    """Write what was noted: the run is not over, it goes on in another world."""
    if world.recorder is not None:
        world.recorder.close()
        world.recorder = None


def _begin(world: Recorded, began: float) -> Line:
    """Return who this rank is."""
    import torch

    return {
        "what": "begin",
        "format": FORMAT,
        "rank": world.rank,
        "ranks": world.size,
        "local_rank": world.local_rank,
        "step": world.step,
        "every": world.recordings.every,
        "again": world.recordings.run in world.recorded_to,
        "seconds": began - world.clock.ahead_seconds,  # on rank 0's clock
        "clock_uncertain_seconds": world.clock.uncertain_seconds,
        "began_unix_seconds": world.began_unix_seconds,  # as all ranks have agreed
        "unix_seconds": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "processor": processor(),
        "cores": usable_cores(),
        "transport": world.transport.name,
        "library": world.transport.library(),
        "gtopk": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
