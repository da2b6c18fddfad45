"""Hogbatch on processes: an MPI window, a mapped file, and a killed process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gtopk.runtime.launch import rank_environment
from gtopk.runtime.launch.mpirun import require_mpirun
from tests.launchers import VENDOR
from tests.started import STARTED_PATH

ROOT = Path(__file__).parents[4]
RANKS, KILLED = 3, 1


def test_mpi_ranks_train_one_shared_model(mpirun: Callable[..., Any]) -> None:
    job = mpirun(RANKS, "hogbatch.py")
    assert job.returncode == 0, job.stderr


def start_alone(rank: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """Start a rank without a launcher, which would end it when another rank dies."""
    program = ROOT / "tests" / "programs" / "hogbatch_killed.py"
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, str(program), str(KILLED), "killed", str(folder), "yes"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": STARTED_PATH,
            "OMP_NUM_THREADS": "1",
        },
    )


def check(folder: Path) -> None:
    """Check that the ranks computed every sample of every epoch exactly once."""
    done = Counter(line for file in folder.iterdir() for line in file.read_text().splitlines())
    assert done == Counter(f"{epoch} {index}" for epoch in range(3) for index in range(200))


def last_line(rank: int) -> str:
    return f"rank {rank} is done; 60 updates; computed again: 10"


def test_other_ranks_finish_after_a_process_is_killed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start_alone(rank, port, tmp_path) for rank in range(RANKS)]
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert codes == [-9 if rank == KILLED else 0 for rank in range(RANKS)], ends
    check(tmp_path)
    for rank, (output, _) in enumerate(ends):
        assert rank == KILLED or output == f"{last_line(rank)}\n"


def test_other_ranks_finish_after_one_exits(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    """Regression: they waited for it until the timeout, and it for them at its program's end."""
    job = mpirun(RANKS, "hogbatch_killed.py", str(KILLED), "exit", str(tmp_path), "yes")
    assert job.returncode == 0, job.stderr
    check(tmp_path)


@pytest.mark.faults
@pytest.mark.skipif(VENDOR != "Open MPI", reason="other mpiruns end all ranks with the killed one")
@pytest.mark.parametrize("shuts_down", ["yes", "no"])
def test_other_ranks_finish_under_mpirun_with_recovery(tmp_path: Path, shuts_down: str) -> None:
    """Regression: after shutdown(), a rank called MPI_Finalize, which waited for the dead one."""
    program = ROOT / "tests" / "programs" / "hogbatch_killed.py"
    job = subprocess.run(
        [
            *(str(require_mpirun()), "-n", str(RANKS), "--enable-recovery"),
            *(sys.executable, str(program), str(KILLED), "killed", str(tmp_path), shuts_down),
        ],
        env={**os.environ, **rank_environment(RANKS), "PYTHONPATH": STARTED_PATH},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    survivors = {last_line(rank) for rank in range(RANKS) if rank != KILLED}
    assert set(job.stdout.splitlines()) >= survivors
    check(tmp_path)
