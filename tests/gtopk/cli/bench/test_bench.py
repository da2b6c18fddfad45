"""The command `gtopk bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gtopk.cli import main


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "bench optimizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "gtopk: bench must be followed by collectives or optimizer\n"),
        (["selektion"], "gtopk: unknown command 'bench selektion'\n"),
    ],
)
def test_unknown_benchmark_prints_the_usage(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"{error}\nusage: gtopk COMMAND")


def test_json_dash_prints_only_records_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "collectives", "--ranks", "2", "--lengths", "100", "--rounds", "1"]
    assert main([*words, "--algorithms", "gtopk", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["records"]
    assert "gtopk" in printed.err
    assert not Path("-").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("collectives --rounds 0", "--rounds: must be a whole number, at least 1, got '0'"),
        ("collectives --seed -1", "--seed: must be a whole number, at least 0"),
        ("optimizer --batch 0", "--batch: must be a whole number, at least 1"),
        ("optimizer --rounds -1", "--rounds: must be a whole number, at least 1"),
    ],
)
def test_invalid_arguments_exit_with_the_reason(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words.split()])
    assert message in capsys.readouterr().err
