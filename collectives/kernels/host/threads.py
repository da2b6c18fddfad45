"""The number of threads of a loop: this rank's share of the cores; 1 under oversubscription.

The launchers' variables tell how many ranks share this machine.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ... import environment
from ...cores import usable_cores

# Open MPI, MPICH and Intel MPI, MVAPICH, torchrun, Horovod.
_COUNTS: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
)


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks run here; 1 where no variable tells."""
    said = [environ.get(name, "") for name in _COUNTS]
    if in_slurm_step(environ):
        said += [_tasks_here(environ), environ.get("SLURM_NTASKS_PER_NODE", "")]
    return max([1, *(int(text) for text in said if text.isdecimal())])


def in_slurm_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether srun started this process: a batch script has most of the variables, too."""
    return "SLURM_STEP_ID" in environ


def _tasks_here(environ: Mapping[str, str]) -> str:
    """Return SLURM's tasks on this node: with "8(x2),4" nodes 0 and 1 have 8, node 2 has 4."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = itertools.chain.from_iterable([count] * int(times or 1) for count, times in found)
    node = environ.get("SLURM_NODEID", "0")
    return next(itertools.islice(tasks, int(node) if node.isdecimal() else 0, None), "")


# A few cores use the whole memory bandwidth; more threads would only slow autograd.
_MOST: Final = 8


_forced: ContextVar[int | None] = ContextVar("threads", default=None)


@contextmanager
def using(count: int) -> Iterator[None]:
    """Run the loops that this thread calls in the context on `count` threads."""
    token = _forced.set(count)
    try:
        yield
    finally:
        _forced.reset(token)


def threads() -> int:
    """Return how many threads a loop may use now."""
    return _forced.get() or default_threads()


@functools.cache
def default_threads() -> int:
    """Return GTOPK_THREADS, or this rank's share of the cores that it may use; >= 1.

    May use: by the affinity, and by the quota of its container. SLURM says what a task's share is
    where one asked for that (--cpus-per-task).

    Raises ValueError for a GTOPK_THREADS that is no positive number.
    """
    if asked := environment.threads():
        return asked
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "") if in_slurm_step() else ""
    share = int(granted) if granted.isdecimal() else usable_cores() // local_ranks()
    return max(1, min(_MOST, share, usable_cores()))
