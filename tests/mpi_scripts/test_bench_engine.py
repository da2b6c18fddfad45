"""`bench_engine.py` measures every case; here the ranks are threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpi_scripts.bench_engine import GRADIENTS, main


def test_engine_gradients_have_the_shapes_of_resnet50():
    assert [len(lengths) for lengths in GRADIENTS.values()] == [161, 161]
    assert sum(GRADIENTS["resnet50"]) == 25_557_032


def test_every_engine_case_is_measured_beside_a_bare_allreduce(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.json"
    words = ["--rounds", "2", "--gradients", "small", "--json", str(path)]
    assert main(words) == 0
    output = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert (written["ranks"], written["transport"]) == (2, "local")
    for record in written["records"]:
        assert record["case"] in output
        assert record["ratio"]["min"] <= record["ratio"]["median"] <= record["ratio"]["max"]
        assert record["engine_seconds"]["min"] > 0
        assert record["bare_seconds"]["min"] > 0
    (step,) = (record for record in written["records"] if record["cycles"])
    assert step["bytes"] == 4 * sum(GRADIENTS["small"])
    assert step["cycles"]["min"] >= 1
