"""The command `gtopk bench`."""

from __future__ import annotations

import pytest

from gtopk.cli import main


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
