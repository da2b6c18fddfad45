"""`gtopk bench engine` measures what it says, on threads here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gtopk.cli.bench.engine import resnet50, small
from gtopk.cli.main import main


def test_the_gradients_are_resnet50s():
    assert len(resnet50()) == len(small()) == 161
    assert sum(resnet50()) == 25_557_032


def test_every_case_is_measured_beside_a_bare_allreduce(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.json"
    words = ["bench", "engine", "--rounds", "2", "--gradients", "small", "--json", str(path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert (written["ranks"], written["transport"]) == (2, "local")
    for record in written["records"]:
        assert record["case"] in said
        assert record["ratio"]["min"] <= record["ratio"]["median"] <= record["ratio"]["max"]
        assert record["engine_seconds"]["min"] > 0
        assert record["bare_seconds"]["min"] > 0
    (step,) = (record for record in written["records"] if record["cycles"])
    assert step["bytes"] == 4 * sum(small())
    assert step["cycles"]["min"] >= 1


def test_too_few_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--rounds", "1"]) == 2
    assert "--rounds must be at least 2, got 1" in capsys.readouterr().err
