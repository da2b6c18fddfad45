"""A benchmark's options take words separated by spaces, and errors list the valid ones."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from gtopk.cli.arguments import share, whole_number
from gtopk.cli.bench.harness import add_words, one_of


def grammar() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser()
    add_words(described, "--ranks", whole_number)
    add_words(described, "--densities", share, [0.5])
    add_words(described, "--data", one_of(("real", "drawn")), ["real"], may_be_none=True)
    return described


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", (None, [0.5], ["real"])),
        ("--ranks 2 4 --densities 1e-3 1 --data drawn", ([2, 4], [0.001, 1.0], ["drawn"])),
        ("--ranks 8 --data", ([8], [0.5], [])),
    ],
)
def test_options_accept_several_words(words: str, found: tuple[Any, ...]) -> None:
    options = grammar().parse_args(words.split())
    assert (options.ranks, options.densities, options.data) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks", "--ranks: expected at least one argument"),
        ("--ranks 2 0", "--ranks: must be a whole number, at least 1, got '0'\n"),
        ("--ranks 1.5", "--ranks: must be a whole number, at least 1, got '1.5'\n"),
        ("--ranks 2,4", "at least 1, got '2,4'; give several with spaces: 2 4\n"),
        ("--densities 0", "--densities: must lie in (0, 1], got '0'\n"),
        ("--densities nan", "--densities: must lie in (0, 1], got 'nan'\n"),
        ("--densities few", "--densities: must lie in (0, 1], got 'few'\n"),
        ("--data real,drawn", "got 'real,drawn'; give several with spaces: real drawn\n"),
        ("--data raw", "--data: must be one of real, drawn; got 'raw'\n"),
    ],
)
def test_invalid_word_exits_with_the_reason(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        grammar().parse_args(words.split())
    assert message in capsys.readouterr().err
