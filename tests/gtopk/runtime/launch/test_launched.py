"""Detect the launcher of a process from its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from gtopk import settings
from gtopk.runtime.launch import Launched, launched_by, launchers, require_sound_ranks
from gtopk.runtime.launch.job import mark_joined, require_own_rank
from tests.started import under

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4"}
HOROVODRUN = {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4"}
ENDED = str(1 << 22)  # beyond the largest pid
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize("environ", [OPEN_MPI, PMI, TORCHRUN, HOROVODRUN, SRUN])
def test_launched_by_reads_rank_and_size_of_each_launcher(environ: dict[str, str]) -> None:
    found = under(environ, launched_by)
    assert found is not None
    assert (found.rank, found.size) == (2, 4)
    assert set(found.variables) == set(environ)


def test_process_started_by_hand_has_no_launcher() -> None:
    assert under({"PATH": "/bin"}, launched_by) is None


def test_mpi_takes_precedence_over_other_launchers() -> None:
    found = under(TORCHRUN | OPEN_MPI, launched_by)
    assert found is not None
    assert found.variables == ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


@pytest.mark.parametrize(
    "outer",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"},  # one agent per node
        {"PMI_RANK": "0", "PMI_SIZE": "1"},  # a shell of srun --pty --mpi=pmi2
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
    ],
)
def test_torchrun_is_the_launcher_of_its_workers_whoever_started_it(
    outer: dict[str, str],
) -> None:
    environ = TORCHRUN | outer | {"TORCHELASTIC_RUN_ID": "none"}
    assert under(environ, launched_by) == Launched("torchrun", 2, 4, ("RANK", "WORLD_SIZE"))
    assert under(environ, launchers) == [
        under(environ, launched_by)
    ]  # they do not contradict each other


def test_horovodrun_inside_a_pmi_launcher_is_the_launcher() -> None:
    found = under(HOROVODRUN | {"PMI_RANK": "0", "PMI_SIZE": "1"}, launched_by)
    assert found is not None
    assert found.launcher == "horovodrun"


@pytest.mark.parametrize("inner", [OPEN_MPI, PMI, TORCHRUN])
def test_srun_that_started_another_launcher_is_ignored(inner: dict[str, str]) -> None:
    found = under(inner | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, launchers)
    assert [(launched.rank, launched.size) for launched in found] == [(2, 4)]


def test_slurm_batch_script_is_no_rank() -> None:
    assert under({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, launched_by) is None


def test_world_of_one_has_a_launcher_only_under_mpi() -> None:
    assert under({"RANK": "0", "WORLD_SIZE": "1"}, launched_by) is None
    alone = under({"PMI_RANK": "0", "PMI_SIZE": "1"}, launched_by)
    assert isinstance(alone, Launched)


def test_incomplete_or_non_numeric_variables_are_no_launcher() -> None:
    assert under({"WORLD_SIZE": "4"}, launchers) == []
    assert under({"RANK": "first", "WORLD_SIZE": "4"}, launchers) == []


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            r"RANK must lie in 0\.\.1, got 2: RANK=2 and W",
        ),
        ({"RANK": "1", "WORLD_SIZE": "1"}, r"RANK must lie in 0\.\.0, got 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, r"RANK must lie in 0\.\.1, got -1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, r"WORLD_SIZE must be at least 1"),
        (
            {"RANK": "one", "WORLD_SIZE": "2"},
            r"RANK and WORLD_SIZE must be whole numbers",
        ),
        ({"HOROVOD_RANK": "4", "HOROVOD_SIZE": "4"}, r"HOROVOD_RANK must lie in 0\.\.3, got 4"),
        ({"PMI_RANK": "3", "PMI_SIZE": "2"}, r"PMI_RANK must lie in 0\.\.1, got 3"),
    ],
)
def test_rank_outside_its_world_is_refused(environ: dict[str, str], error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        under(environ, require_sound_ranks)


def test_valid_or_incomplete_ranks_are_accepted() -> None:
    for rank in range(3):
        under({"RANK": str(rank), "WORLD_SIZE": "3"}, require_sound_ranks)
    under({}, require_sound_ranks)
    under({"RANK": "7"}, require_sound_ranks)


@pytest.mark.parametrize("environ", [OPEN_MPI, PMI, TORCHRUN, HOROVODRUN, SRUN])
def test_child_process_of_a_rank_is_not_the_rank(environ: dict[str, str]) -> None:
    job = under(environ, launched_by)
    assert job is not None
    with patch.dict(os.environ, environ, clear=True):
        mark_joined(job)
        require_own_rank(job)  # the rank itself, again
        inherited = dict(os.environ)
    command = [
        *(sys.executable, "-c"),
        "import sys; from gtopk.runtime.launch.job import *; require_own_rank(launched_by())",
    ]
    child = subprocess.run(command, env=inherited, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert f"rank 2 of {job.launcher} is process {os.getpid()}, which started" in child.stderr
    for other in (
        {"MASTER_PORT": "2"},  # this rank's own job
        {settings.JOB.name: "2"},  # started with gtopk.run
        {settings.JOINED.name: inherited[settings.JOINED.name].replace(f"{os.getpid()}", ENDED, 1)},
        {settings.JOINED.name: ""},
    ):
        subprocess.run(command, env=inherited | other, check=True)
