"""How ranks come to be: the cores they may use, mpirun to start them, and who started this one."""

from __future__ import annotations

from collectives.cores import allowed_cores, core_quota, usable_cores

from .errors import LaunchError, LaunchTimeoutError
from .launched import Launched, carried_by, launched_by, launchers
from .mpirun import (
    Mpi,
    by_reason,
    explain,
    find_mpirun,
    identify,
    mpirun_command,
    rank_environment,
    run,
)

__all__ = [
    "LaunchError",
    "LaunchTimeoutError",
    "Launched",
    "Mpi",
    "allowed_cores",
    "by_reason",
    "carried_by",
    "core_quota",
    "explain",
    "find_mpirun",
    "identify",
    "launched_by",
    "launchers",
    "mpirun_command",
    "rank_environment",
    "run",
    "usable_cores",
]
