"""The command `gtopk bench`."""

from __future__ import annotations

import json

import pytest

from gtopk.cli.main import main


def test_help_lists_what_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "selection" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["selektion"]])
def test_what_is_no_benchmark_ends_with_the_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert "usage: gtopk bench WHAT" in said
    assert all(word in said for word in words)


def test_records_are_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "wire", "--entries", "50", "--elements", "0", "--rounds", "1"]
    assert main([*words, "--densities", "0.01", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["records"]
    assert "nanoseconds" in printed.err
