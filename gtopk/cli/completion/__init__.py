"""`gtopk completion`: what a shell needs to complete the command's words, made from its grammar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from . import bash, fish, zsh
from .grammar import Grammar

_SCRIPTS: Final[dict[str, Callable[[Grammar], str]]] = {
    "bash": bash.script,
    "zsh": zsh.script,
    "fish": fish.script,
}
SHELLS: Final = tuple(_SCRIPTS)
_HOW: Final = (
    "gtopk completion bash > ~/.local/share/bash-completion/completions/gtopk",
    "gtopk completion zsh > ~/.gtopk.zsh       # and in ~/.zshrc: source ~/.gtopk.zsh",
    "gtopk completion fish > ~/.config/fish/completions/gtopk.fish",
)


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk completion",
        description="Print the completion script for a shell.",
        epilog="example:\n"
        + "\n".join(f"  {line}" for line in _HOW)
        + "\n\nOnce for each version of gtopk: to make it takes some seconds.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("shell", choices=SHELLS)
    return described


def main(grammar: Grammar, arguments: Sequence[str] | None = None) -> int:
    """Print the script for a shell and return the exit code."""
    options = parser().parse_args(arguments)
    sys.stdout.write(_SCRIPTS[options.shell](grammar))
    return 0
