"""Which launcher started this process, and which rank of how many it says this process is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ... import settings


class Launched(NamedTuple):
    """What one launcher says; `variables` are the two environment variables it says it in."""

    launcher: str
    rank: int
    size: int
    variables: tuple[str, str]


# Name, variable of the rank, variable of the size.
_TORCHRUN = ("torchrun", "RANK", "WORLD_SIZE")
# Which of several is the inner one: srun with PMI starts shells, and agents whose ranks inherit
# what it said to the agent. RANK comes last: people set it by hand, too.
_FAMILIES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("a PMI launcher", "PMI_RANK", "PMI_SIZE"),  # MPICH's mpirun, or srun
    _TORCHRUN,
)
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # nobody sets it but the agent, and of its workers only
# A step's size, not the job's: a batch script has the latter without being a rank.
_SRUN = ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def launchers(environ: Mapping[str, str] = os.environ) -> list[Launched]:
    """Return what every launcher that left its mark says, the innermost first.

    Whoever started a torchrun's agent does not count; srun only alone: it starts the daemons of
    mpirun, too.
    """
    worker = _read(_TORCHRUN, environ) if environ.get(_OF_TORCHRUN) else None
    if worker is not None and worker.size > 1:
        return [worker]
    found = [said for family in _FAMILIES if (said := _read(family, environ))]
    if not found and (said := _read(_SRUN, environ)):
        found.append(said)
    return found


def launched_by(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the launcher whose rank this process is; None when it runs alone."""
    said = launchers(environ)
    return next((s for s in said if s.variables[1] in _MPI_SIZES or s.size > 1), None)


def require_sound_ranks(environ: Mapping[str, str] = os.environ) -> None:
    """Raise RuntimeError where a rank's number is none of the size that goes with it.

    Who counts ranks from 1, or sets WORLD_SIZE too small, would else wait for ranks in vain.
    """
    for launcher, rank, size in (*_FAMILIES, _SRUN):
        if not environ.get(rank) or not environ.get(size):  # an empty one is as good as none
            continue
        said = f"{rank}={environ[rank]} and {size}={environ[size]} ({launcher})"
        try:
            number, count = int(environ[rank]), int(environ[size])
        except ValueError:
            raise RuntimeError(f"{rank} and {size} must be whole numbers, got {said}") from None
        if count < 1:
            raise RuntimeError(f"{size} must be at least 1, got {said}")
        if not 0 <= number < count:
            raise RuntimeError(
                f"{rank} must lie in 0..{count - 1}, got {number}: {said}; ranks count from 0, and "
                f"{size} is how many there are"
            )


def carried_by(job: Launched | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the transport that the environment and the launcher ask for."""
    if wanted := settings.TRANSPORT.read(environ):
        return wanted
    if job is None:
        return "local"
    # srun --mpi=pmix leaves only PMIX_RANK, and to what its tasks start as well.
    by_pmix = job.launcher == _SRUN[0] and environ.get("PMIX_RANK")
    if job.variables[1] in _MPI_SIZES or by_pmix:
        return "mpi"
    return "torch.distributed" if job.size > 1 else "local"


def _read(family: tuple[str, str, str], environ: Mapping[str, str]) -> Launched | None:
    launcher, rank, size = family
    try:
        return Launched(launcher, int(environ[rank]), int(environ[size]), (rank, size))
    except (KeyError, ValueError):
        return None
