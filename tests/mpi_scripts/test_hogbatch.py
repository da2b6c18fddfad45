"""The wall-clock comparison of hogbatch: its report, and when it rejects a measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpi_scripts.hogbatch import MODES, REJECTED, Point, Run

RUN = Run("hogbatch", 0, [Point(1, 0.5, 0.8), Point(2, 0.2, 0.9)], [1, 6, 3], [], 0, 0)


def test_run_reports_seconds_to_a_loss_and_share_of_slow_updates() -> None:
    assert [RUN.loss_at(seconds) for seconds in (1, 1.5, 3)] == [0.5, 0.5, 0.2]
    assert RUN.loss_at(0.5) == float("inf")
    assert [RUN.seconds_to(loss) for loss in (0.5, 0.3, 0.1)] == [1, 2, None]
    assert RUN.slow_share == 0.9


@pytest.mark.matrix
def test_hogbatch_script_times_workers_in_every_mode(
    mpirun: Callable[..., Any], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    job = mpirun(
        2,
        "mpi_scripts/hogbatch.py",
        *("--repeat", "1", "3", "--data", "wine", "--hidden", "16", "--batch", "32"),
        *("--slow", "2:8", "--fast", "4:32", "--seconds", "0.4", "--seeds", "1"),
        *("--calibration", "3", "--json", str(record)),
    )
    assert job.returncode in (0, REJECTED), job.stderr  # a busy machine may be rejected
    lines = job.stdout.splitlines()
    assert lines.pop(0) == "data: wine; hidden layers [16]"
    assert lines[0].startswith("wall clock; work is repeated 1:3 times, measured ")
    assert [line.split()[0] for line in lines[2 : 2 + len(MODES)]] == list(MODES)
    runs = {run["mode"]: run for run in json.loads(record.read_text())["runs"]}
    assert runs["slow-only"]["slow_share"] == 1
    assert runs["fast-only"]["slow_share"] == 0
    assert 0 < runs["hogbatch"]["slow_share"] < 1
