"""README is short, and what it shows of a command is what the command prints."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from docs.make.blocks import blocks
from gtopk.cli.plan import main as plan

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = list(blocks(README))
WORDS = 1000


def test_readme_is_within_its_word_limit() -> None:
    assert len(README.split()) <= WORDS


def test_readme_shows_what_gtopk_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    typed = [line for block in BLOCKS for line in block.text.splitlines()]
    (command,) = [line for line in typed if line.startswith("gtopk plan ")]
    (shown,) = [block.text for block in BLOCKS if block.language == "text"]
    assert plan(shlex.split(command)[2:]) == 0
    printed = capsys.readouterr().out
    parts = shown.split("\n\n")  # shortened by whole lines
    assert [line for line in parts[0].splitlines() if line not in printed.splitlines()] == []
    assert "".join(parts[1:]) in printed


def test_readme_backward_example_turns_the_plans_answer(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [
        line
        for block in BLOCKS
        for line in block.text.splitlines()
        if line.startswith("gtopk plan ")
    ]
    assert "`--backward-ms 3200`" in README
    assert "`Do not compress here`" in README
    assert plan([*shlex.split(command)[2:], "--backward-ms", "3200"]) == 0
    assert "Do not compress here" in capsys.readouterr().out
