"""Ranks that are late, slow or in another order are not mistaken for dead ones."""

from __future__ import annotations

import re

import pytest

from collectives.cores import usable_cores


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.faults)])
def test_slow_ranks_train_bit_identically_and_are_not_given_up(request, launcher):
    start = request.getfixturevalue(launcher)
    variables = {"GTOPK_HEARTBEAT_TIMEOUT": "2.5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    job = start(2, "out_of_step.py", timeout=120, **variables)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("all went on") == 2
    # Waiting ranks report whom they wait for; nobody is given up.
    assert "has waited" in job.stderr
    # Rank 0 reports a rank that is slow in every step.
    slow = re.findall(r"gtopk: rank 0: rank (\d) \(host .*\) computes .* per step", job.stderr)
    assert slow == (["1"] if usable_cores() > 1 else []), job.stderr
    assert "is lost" not in job.stderr
    assert "stopped for" not in job.stderr


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.faults)])
def test_clock_jump_of_hours_ends_no_job_and_warns_of_no_rank(request, tmp_path, launcher):
    start = request.getfixturevalue(launcher)
    variables = {"GTOPK_HEARTBEAT_TIMEOUT": "2.5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}
    variables |= {"GTOPK_TIMEOUT": "20", "GTOPK_RUN": str(tmp_path / "run")}
    job = start(2, "clock_jumps.py", str(tmp_path / "saved"), timeout=120, **variables)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("well") == 2
    assert "gtopk: " not in job.stderr
