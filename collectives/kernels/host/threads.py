"""How many threads a loop may use: the cores that are free, none more under oversubscription."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ...environment import whole_number

# Ranks on this machine: Open MPI, MPICH and Intel MPI, MVAPICH, torchrun, Horovod.
_LOCAL_RANKS: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
)
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
    """Return GTOPK_THREADS, or this rank's share of the cores that the affinity allows; >= 1.

    Raises ValueError for a GTOPK_THREADS that is no positive number.
    """
    if asked := whole_number("GTOPK_THREADS", 0, "threads"):
        return asked
    said = [os.environ.get(name, "") for name in _LOCAL_RANKS]
    ranks = max([1, *(int(text) for text in said if text.isdecimal())])
    return max(1, min(_MOST, _cores() // ranks))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
