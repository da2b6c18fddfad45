"""How many ranks share this machine, as the launchers' variables say it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Final

# Open MPI, MPICH and Intel MPI, MVAPICH, torchrun, Horovod.
_COUNTS: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
)


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks run here; 1 where nobody says so."""
    said = [environ.get(name, "") for name in _COUNTS]
    if in_slurm_step(environ):
        said += [_tasks_here(environ), environ.get("SLURM_NTASKS_PER_NODE", "")]
    return max([1, *(int(text) for text in said if text.isdecimal())])


def in_slurm_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether srun started this process: a batch script has most of the variables, too."""
    return "SLURM_STEP_ID" in environ


def _tasks_here(environ: Mapping[str, str]) -> str:
    """Return what SLURM says of this node: of "8(x2),4" the nodes 0 and 1 have 8, node 2 has 4."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = itertools.chain.from_iterable([count] * int(times or 1) for count, times in found)
    node = environ.get("SLURM_NODEID", "0")
    return next(itertools.islice(tasks, int(node) if node.isdecimal() else 0, None), "")
