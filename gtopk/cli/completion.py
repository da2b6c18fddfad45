"""`gtopk completion`: print a completion script for bash, zsh or fish.

shtab generates the script from the parsers of all subcommands. Run it again after each upgrade.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from . import COMMANDS
from .arguments import Command, fail

SHELLS: Final = ("bash", "zsh", "fish")
_HOW: Final = (
    "gtopk completion bash > ~/.local/share/bash-completion/completions/gtopk",
    'in ~/.zshrc, after compinit: eval "$(gtopk completion zsh)"',
    "gtopk completion fish > ~/.config/fish/completions/gtopk.fish",
)


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk completion",
        "Print the completion script for a shell. It needs shtab: pip install shtab.",
        "\n  ".join(_HOW) + "\n\nRun it once for each version of gtopk; it takes some seconds.",
    )
    described.add_argument("shell", choices=SHELLS)
    return described


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, keyed by names such as "plan" or "bench optimizer".

    A command that cannot be imported here gets a parser with --help only.
    """
    found = {}
    for name, (module, _) in COMMANDS.items():
        try:
            found[name] = importlib.import_module(module, __package__).parser()
        # torch raises OSError if a shared library is missing; complete the other commands anyway.
        except (ImportError, OSError):
            found[name] = argparse.ArgumentParser()
    return found


def _all_commands(file: Any) -> argparse.ArgumentParser:
    """Return one parser of all commands; mark arguments that may name a file with `file`."""
    root = argparse.ArgumentParser("gtopk")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers()
    benchmarks = commands.add_parser("bench", help="measure this machine").add_subparsers()
    for name, described in parsers().items():
        *bench, word = name.split()
        among, meaning = benchmarks if bench else commands, COMMANDS[name][1]
        added = among.add_parser(word, parents=[described], add_help=False, help=meaning)
        for action in added._actions:
            # An argument with another type is a number or similar, not a file.
            may_be_file = action.type in (None, Path) or action.metavar == "FILE"
            if action.nargs != 0 and not action.choices and may_be_file:
                vars(action)["complete"] = file
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script for a shell and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        import shtab
    except ImportError:
        return fail("completion", "shtab is not installed: pip install shtab")
    print(shtab.complete(_all_commands(shtab.FILE), options.shell))
    return 0
