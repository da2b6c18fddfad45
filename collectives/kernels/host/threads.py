"""How many threads a loop may use: the cores that are free, none more under oversubscription."""

from __future__ import annotations

import functools
import os
from typing import Final

# Ranks on this machine, as launchers say it: Open MPI, MPICH and Intel MPI, torchrun, Horovod.
_LOCAL_RANKS: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
)
# A few cores draw all that the memory gives; more would be taken from autograd for nothing.
_MOST: Final = 8


@functools.cache
def threads() -> int:
    """Return GTOPK_THREADS, or this rank's share of the cores that the affinity allows; >= 1.

    Raises ValueError for a GTOPK_THREADS that is no positive number.
    """
    asked = os.environ.get("GTOPK_THREADS")
    if asked is not None:
        if not (asked.isdecimal() and int(asked) > 0):
            raise ValueError(f"GTOPK_THREADS must be a number of threads, 1 or more, got {asked!r}")
        return int(asked)
    said = [os.environ.get(name, "") for name in _LOCAL_RANKS]
    ranks = max([1, *(int(text) for text in said if text.isdecimal())])
    return max(1, min(_MOST, _cores() // ranks))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
