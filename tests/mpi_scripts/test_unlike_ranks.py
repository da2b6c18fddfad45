"""The wall-clock comparison of unlike ranks: its report, and when it rejects a measurement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpi_scripts.unlike_ranks import MODES, REJECTED, flaws


def test_speeds_at_the_requested_ratio_have_no_flaw() -> None:
    assert flaws([1, 3], [[1.0, 1.05, 0.95], [3.1, 3.0, 2.9]]) == []


def test_wrong_speed_ratio_is_a_flaw() -> None:
    assert flaws([1, 3], [[1.0, 1.0], [2.0, 2.0]]) == ["the ratio is off by 50 %, more than 15 %"]


def test_rank_of_varying_speed_is_a_flaw() -> None:
    (flaw,) = flaws([1, 1], [[1.0, 1.0, 1.0], [0.5, 1.0, 1.5]])
    assert flaw.startswith("rank 1 varies by 50 %")


@pytest.mark.matrix
def test_unlike_ranks_script_times_every_mode(mpirun: Callable[..., Any]) -> None:
    job = mpirun(
        2,
        "mpi_scripts/unlike_ranks.py",
        *("--rounds", "1", "--samples", "512", "--batch", "64", "--hidden", "32"),
        *("--calibration", "3", "--modes", *MODES),
    )
    assert job.returncode in (0, REJECTED), job.stderr  # a busy machine may be rejected
    lines = job.stdout.splitlines()
    assert lines[0].startswith("work is repeated 1:3 times; measured ")
    assert [line.split()[0] for line in lines[1:4]] == list(MODES)
    assert ("rejected:" in job.stdout) == (job.returncode == REJECTED)


def test_wrong_number_of_repeat_factors_is_refused() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "mpi_scripts" / "unlike_ranks.py"), "--repeat", "1", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "--repeat needs 1 numbers, one for each rank" in done.stderr
