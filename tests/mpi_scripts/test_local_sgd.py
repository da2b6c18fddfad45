"""The comparison of LocalSGD with an exchange in every step: bytes sent, and exchanges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpi_scripts.local_sgd import main, recipes


def test_rounds_of_four_steps_exchange_a_quarter_as_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.json"
    few = ["--ranks", "2", "--inner-steps", "4", "--densities", "0.1", "--seeds", "2"]
    assert main([*few, "--epochs", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["results"]
    names = [name for name, _ in recipes([4], [0.1])]
    assert [each["recipe"] for each in found] == names
    every, rounds = ({r["recipe"]: r for r in found}[n]["runs"][0] for n in (names[0], names[3]))
    assert names[3] == "DiLoCo, 4 steps"
    assert rounds["exchanges"] == -(-every["exchanges"] // 4)
    assert rounds["sent_bytes"] < every["sent_bytes"] / 3
    assert capsys.readouterr().out.count("\n") == 2 + len(names)


def test_a_single_seed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "1"])
    assert "at least 2" in capsys.readouterr().err
