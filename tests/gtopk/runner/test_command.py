"""`gtopk run` says what it would start, and passes on how it ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gtopk.runner.command import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["--dry-run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    return str(tmp_path / "train.py")


def test_each_launcher_gets_the_script_and_its_arguments(capsys, script: str, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: f"/bin/{name}")
    for launcher, word in (
        ("mpirun", "-n"),
        ("torchrun", "--nproc-per-node=3"),
        ("srun", "--ntasks=3"),
    ):
        found = said(capsys, "-n", "3", "--launcher", launcher, script, "--lr", "1", "-n", "9")
        assert found["launcher"] == launcher
        assert word in found["command"]
        assert found["command"][-6:] == [sys.executable, script, "--lr", "1", "-n", "9"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert said(capsys, script)["launcher"] == "srun"


def test_records_are_asked_for_by_the_environment(capsys, script: str) -> None:
    found = said(capsys, "-n", "2", "--record", "runs/a", "--timeline", "traces", "-m", "pkg")
    assert found["variables"]["GTOPK_RUN"] == str(Path("runs/a").absolute())
    assert found["variables"]["GTOPK_TIMELINE"] == str(Path("traces").absolute())
    assert found["command"][-3:] == [sys.executable, "-m", "pkg"]


def test_hosts_say_how_many_ranks_there_are(capsys, script: str) -> None:
    found = said(capsys, "--hosts", "localhost:3", script)
    assert found["ranks"] == 3


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "0", "true"], "--ranks must be at least 1, got 0"),
        (["no_such_script.py"], "SCRIPT must be a file or a program"),
        (["-n", "4", "--hosts", "localhost:2", "true"], "4 ranks need as many slots"),
    ],
)
def test_what_cannot_be_started_says_why(capsys, words: list[str], text: str) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err
