"""Shells learn the command's words from its grammar."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import nullcontext

import pytest

from gtopk.cli import completable, main
from gtopk.completion import SHELLS


def completed(script: str, words: list[str]) -> list[str]:
    """Return what bash would complete, the last word being begun."""
    line = f"{script}\nCOMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}\n"
    shown = f'{line}_gtopk; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_benchmarks_and_options(capsys) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, ["gtopk", "si"]) == ["simulate"]
    assert completed(script, ["gtopk", "bench", "col"]) == ["collectives"]
    assert completed(script, ["gtopk", "bench", "wire", "--den"]) == ["--densities"]
    assert completed(script, ["gtopk", "top", "--o"]) == ["--once"]
    assert completed(script, ["gtopk", "completion", "f"]) == ["fish"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shells_script_is_of_its_language(capsys, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "gtopk" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_every_command_can_be_completed_and_shows_an_example(capsys) -> None:
    words = completable()
    for command in words:
        if command in ("", "completion"):
            continue
        assert words[command], command
        with nullcontext() if command == "bench" else pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        assert "example:" in capsys.readouterr().out, command
