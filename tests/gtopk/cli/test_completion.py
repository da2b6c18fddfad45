"""Shell completion follows the parsers; tests use each installed shell interactively."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from gtopk.cli import main
from gtopk.cli.completion import SHELLS, parsers

PROMPT: Final = "what now> "
KEY: Final = "\x07"  # records the completions of the line, and clears it

# The typed text, and the valid completions of its last word, in a folder with FILES.
FILES: Final = ("report/page.html", "plan/a", "runs/first", "my script.py")
OFFERED: Final[Mapping[str, set[str]]] = {
    "gtopk re": {"report"},
    "gtopk --v": {"--version"},
    "gtopk bench ": {"collectives", "optimizer"},
    "gtopk bench optimizer --den": {"--density"},
    "gtopk bench opt": {"optimizer"},
    "gtopk completion ": set(SHELLS),
    "gtopk top --o": {"--once"},
    "gtopk plan --model lstm": {"lstm-an4", "lstm-ptb"},
    "gtopk plan --ranks ": set(),
    "gtopk plan --json ru": {"runs"},
    "gtopk bench optimizer --json ru": {"runs"},
    "gtopk report ru": {"runs"},
    "gtopk report plan --back": set(),
    "gtopk run --launcher m": {"mpirun"},
    "gtopk run --record ru": {"runs"},
    "gtopk run -n 4 my": {"my script.py"},
}

RC: Final = {
    "bash": f"""
PS1='{PROMPT}'
source "$SCRIPT"
show() {{ printf '%s\\n' "$READLINE_LINE" >> "$SHOWN"; READLINE_LINE=''; READLINE_POINT=0; }}
bind -x '"\\C-xs": show'
bind '"{KEY}": "\\e*\\C-xs"'
""",
    "zsh": f"""
PS1='{PROMPT}'
source "$SCRIPT"
typeset -a offered
compadd() {{
    local -a these
    if [[ ${{@[(I)-[OAD]]}} = 0 ]]; then
        builtin compadd -O these "$@"
        offered+=("${{these[@]}}")
    fi
    builtin compadd "$@"
}}
show() {{
    offered=()
    zle list-choices
    print -r -- "${{(@q)${{(@Q)offered}}}}" >> "$SHOWN"
    BUFFER=''
}}
zle -N show
bindkey '{KEY}' show
""",
}


def by_keys(words: Sequence[str], start: str, folder: Path, more: str = "") -> list[str]:
    """Type each line and the KEY into an interactive shell; return what it recorded.

    more: further keys.
    """
    variables = {"SCRIPT": str(folder / "script"), "SHOWN": str(folder / "shown")}
    (folder / start).write_text(RC[words[0]], encoding="utf-8")
    terminal, its_end = pty.openpty()
    shell = subprocess.Popen(
        words,
        cwd=folder / "files",
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env={"PATH": os.environ["PATH"], "TERM": "dumb", "ZDOTDIR": str(folder), **variables},
        start_new_session=True,
    )
    os.close(its_end)
    too_long = threading.Timer(60, shell.kill)
    too_long.start()
    printed = b""
    with suppress(OSError):  # the shell has exited
        while PROMPT.encode() not in printed:
            printed += os.read(terminal, 4096)
        os.write(terminal, "".join(f"{line}{KEY}" for line in OFFERED).encode())
        os.write(terminal, more.encode() + b"exit\n")
        while True:
            printed += os.read(terminal, 4096)
    os.close(terminal)
    shell.wait()
    too_long.cancel()
    shown = folder / "shown"
    assert shown.exists(), printed.decode()
    return shown.read_text(encoding="utf-8").splitlines()


def bash(folder: Path) -> list[set[str]]:
    """Return bash's completions of each line; without any, the word stays unchanged."""
    words = ["bash", "--noprofile", "--rcfile", str(folder / "rc"), "-i"]
    *shown, tabbed = by_keys(words, "rc", folder, more="gtopk re\t\x18s")
    assert tabbed == "gtopk report "  # the command, although a folder has the same name
    found = []
    for line, all_inserted in zip(OFFERED, shown, strict=True):
        before, _, begun = line.rpartition(" ")
        inserted = set(shlex.split(all_inserted[len(before) + 1 :]))
        found.append(inserted - {begun} if begun else inserted)
    return found


def zsh(folder: Path) -> list[set[str]]:
    """Return zsh's completions of each line."""
    return [set(shlex.split(shown)) for shown in by_keys(["zsh", "-d", "-i"], ".zshrc", folder)]


def fish(folder: Path) -> list[set[str]]:
    """Return fish's completions of each line."""
    queries = [f"complete -C {shlex.quote(line)}; echo END" for line in OFFERED]
    done = subprocess.run(
        ["fish", "--no-config", "-c", "\n".join(["source ../script", *queries])],
        cwd=folder / "files",
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    answers = done.stdout.split("END\n")[:-1]
    words = [[line.split("\t")[0] for line in answer.splitlines()] for answer in answers]
    return [{word.removesuffix("/") for word in each} for each in words]  # it marks folders


@pytest.mark.parametrize("shell", SHELLS)
def test_shell_offers_exactly_the_valid_completions(shell, tmp_path, capsys) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for name in FILES:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).touch()
    assert main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out, encoding="utf-8")
    found = {"bash": bash, "zsh": zsh, "fish": fish}[shell](tmp_path)
    assert dict(zip(OFFERED, found, strict=True)) == OFFERED


def test_completion_without_shtab_prints_the_install_command(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err


def test_every_command_can_be_completed() -> None:
    for name, described in parsers().items():
        assert any(action.option_strings != ["-h", "--help"] for action in described._actions), name
