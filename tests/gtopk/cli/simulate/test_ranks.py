"""Simulated ranks give the same results in separate processes as in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.matrix
def test_mpi_ranks_simulate_the_same_as_one_process(mpirun: Callable[..., Any]) -> None:
    job = mpirun(3, "simulates.py")
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank}: done" for rank in range(3)]
