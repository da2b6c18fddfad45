"""The command `gtopk bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gtopk.cli import main


def test_help_lists_what_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "bench optimizer" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["selektion"]])
def test_what_is_no_benchmark_ends_with_the_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert "usage: gtopk COMMAND" in said
    assert f"unknown command '{' '.join(['bench', *words])}'" in said


def test_records_are_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "collectives", "--ranks", "2", "--lengths", "100", "--rounds", "1"]
    assert main([*words, "--algorithms", "gtopk", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["records"]
    assert "gtopk" in printed.err
    assert not Path("-").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("collectives --rounds 0", "--rounds: must be a whole number, at least 1, got '0'"),
        ("collectives --seed -1", "--seed: must be a whole number, at least 0"),
        ("optimizer --batch 0", "--batch: must be a whole number, at least 1"),
        ("optimizer --rounds -1", "--rounds: must be a whole number, at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words.split()])
    assert said in capsys.readouterr().err
