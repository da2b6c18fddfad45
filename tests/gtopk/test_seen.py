"""The commands that show runs, on a real run of three ranks, one of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gtopk.cli import main
from gtopk.telemetry.reading import read_run

PROGRAM = Path(__file__).parents[1] / "programs" / "seen.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder of a run with record and traces, and the finished process."""
    folder = tmp_path_factory.mktemp("seen")
    options = ["-n", "3", "--record", str(folder / "run"), "--timeline", str(folder / "traces")]
    finished = subprocess.run(
        [sys.executable, "-m", "gtopk", "run", *options, str(PROGRAM)],
        env={**os.environ, "GTOPK_ADVICE": "on", "GTOPK_CALIBRATION": "off"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return folder, finished


def test_run_with_a_killed_rank_returns_nonzero(run) -> None:
    assert run[1].returncode != 0


def test_advice_is_logged_once_by_rank_0(run) -> None:
    advice = [line for line in run[1].stderr.splitlines() if "(estimate)" in line]
    assert len(advice) == 1
    assert advice[0].startswith("gtopk: rank 0: 3 ranks over ")
    assert len(advice[0]) < 200


def test_every_rank_has_a_complete_record(run) -> None:
    ranks = read_run(run[0] / "run").ranks
    assert [rank.rank for rank in ranks] == [0, 1, 2]
    for rank in ranks:
        steps = [step.report.step for step in rank.steps]
        assert steps == list(range(len(steps)))
        assert len(steps) == 31
        assert all(step.report.predicted_seconds > 0 for step in rank.steps)
        assert rank.values[-1].content["loss"] == pytest.approx(1 / 31)
    assert ranks[2].end is None
    assert all("rank 2 is lost" in rank.end or "SIGTERM" in rank.end for rank in ranks[:2])


def test_report_top_and_timeline_read_the_run(run, capsys) -> None:
    folder = run[0]
    assert main(["report", str(folder / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [rank["steps"] for rank in report["ranks"]] == [31, 31, 31]
    assert main(["top", str(folder / "run"), "--once"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["timeline", str(folder / "traces"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == [0, 1, 2]
    records = json.loads((folder / "traces" / "timeline.json").read_text())
    begun: dict[int, list[float]] = {}
    for record in records:
        if record.get("name") == "BACKWARD":
            begun.setdefault(record["pid"], []).append(record["ts"])
    assert sorted(begun) == [0, 1, 2]
