"""The command `gtopk`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gtopk
from gtopk.cli import main


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gtopk {gtopk.__version__}\n"
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert "demo" in help_text
    assert "doctor" in help_text


@pytest.mark.parametrize("words", [[], ["dmeo"]])
def test_what_is_no_command_ends_with_the_usage(capsys, words):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "usage: gtopk COMMAND" in said
    assert all(word in said for word in words)


def test_python_m_gtopk_is_the_command():
    said = subprocess.run(
        [sys.executable, "-m", "gtopk", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout == f"gtopk {gtopk.__version__}\n"
