"""The Slurm allocation that this process was given: is there one, and how many ranks fit it?"""

from __future__ import annotations

import os
import re
import shutil

from collectives.cores import usable_cores
from collectives.environment import whole_number


def in_allocation() -> bool:
    """Tell whether srun can start ranks from here."""
    return bool(os.environ.get("SLURM_JOB_ID")) and shutil.which("srun") is not None


def allocated_tasks() -> int:
    """Return how many tasks were asked for; where only nodes were, a task for each core of theirs.

    Raises ValueError for a variable of Slurm's that is no number.
    """
    if asked := whole_number("SLURM_NTASKS", 0):
        return asked
    hosts = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")  # such as 16(x2),8
    each = re.findall(r"(\d+)(?:\(x(\d+)\))?", hosts)
    of_a_task = max(1, whole_number("SLURM_CPUS_PER_TASK", 1))
    return sum(int(cores) // of_a_task * int(times or 1) for cores, times in each) or usable_cores()
