"""Launch: start ranks, and find out which launcher started this one. It needs no other package.

job.py        a launcher and its ranks: find out who started this rank, start and end a job
mpirun.py     mpirun with the settings that it needs here
"""

from __future__ import annotations

from ...errors import LaunchError, LaunchTimeoutError
from .job import (
    Launched,
    launched_by,
    launcher_transport,
    launchers,
    require_sound_ranks,
    transport_name,
)
from .mpirun import (
    Mpi,
    by_reason,
    explain,
    find_mpirun,
    identify,
    mpirun_command,
    mpirun_settings,
    rank_environment,
    run,
)

__all__ = [
    "LaunchError",
    "LaunchTimeoutError",
    "Launched",
    "Mpi",
    "by_reason",
    "explain",
    "find_mpirun",
    "identify",
    "launched_by",
    "launcher_transport",
    "launchers",
    "mpirun_command",
    "mpirun_settings",
    "rank_environment",
    "require_sound_ranks",
    "run",
    "transport_name",
]
