"""`gtopk completion`: what a shell needs to complete the command's words, made from its grammar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")
_HOW: Final = (
    "gtopk completion bash > ~/.local/share/bash-completion/completions/gtopk",
    "gtopk completion zsh > ~/.gtopk.zsh       # and in ~/.zshrc: source ~/.gtopk.zsh",
    "gtopk completion fish > ~/.config/fish/completions/gtopk.fish",
)

# By command ("run", "bench wire"): what may follow it, options first.
Words = Mapping[str, Sequence[str]]


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk completion",
        description="Print what lets a shell complete the words of `gtopk`.",
        epilog="example:\n"
        + "\n".join(f"  {line}" for line in _HOW)
        + "\n\nOnce for each version of gtopk: to make it takes some seconds.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described.add_argument("shell", choices=SHELLS)
    return described


def main(words: Words, arguments: Sequence[str] | None = None) -> int:
    """Print the script for a shell and return the exit code."""
    options = parser().parse_args(arguments)
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](words))
    return 0


def options_of(described: argparse.ArgumentParser) -> list[str]:
    """Return the options of a grammar, each in its longest form, and its choices of words."""
    found = [
        max(action.option_strings, key=len)
        for action in described._actions
        if action.option_strings
    ]
    for action in described._actions:
        if not action.option_strings and action.choices:
            found += map(str, action.choices)
    return found


def bash(words: Words) -> str:
    """Return a script for bash; files complete where nothing else does."""
    cases = "\n".join(
        f"        '{command}') words='{' '.join(those)}' ;;" for command, those in words.items()
    )
    return f"""_gtopk() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command='' words=''
    if [ "$COMP_CWORD" -gt 1 ]; then command="${{COMP_WORDS[1]}}"; fi
    if [ "$command" = bench ] && [ "$COMP_CWORD" -gt 2 ]; then
        command="bench ${{COMP_WORDS[2]}}"
    fi
    case "$command" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ "$COMP_CWORD" -gt 1 ] && [ "${{#COMPREPLY[@]}}" = 0 ]; then
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _gtopk gtopk
"""


def zsh(words: Words) -> str:
    """Return a script for zsh, which runs that of bash."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash(words)}"


def fish(words: Words) -> str:
    """Return a script for fish."""
    lines = []
    for command, those in words.items():
        seen = " ".join(command.split())
        condition = (
            f"__fish_seen_subcommand_from {seen.split()[-1]}" if seen else "__fish_use_subcommand"
        )
        for word in those:
            if word.startswith("--"):
                lines.append(f"complete -c gtopk -n '{condition}' -l {word[2:]}")
            elif word.startswith("-"):
                lines.append(f"complete -c gtopk -n '{condition}' -s {word[1:]}")
            else:
                lines.append(f"complete -c gtopk -n '{condition}' -a {word}")
    return "\n".join(lines) + "\n"
