"""How many threads a loop may use: the cores that are free, none more under oversubscription."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ... import environment
from ...cores import usable_cores
from .local_ranks import in_slurm_step, local_ranks

# A few cores draw all that the memory gives; more would be taken from autograd for nothing.
_MOST: Final = 8


_forced: ContextVar[int | None] = ContextVar("threads", default=None)


@contextmanager
def using(count: int) -> Iterator[None]:
    """Have the loops that this thread calls run on so many threads."""
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
