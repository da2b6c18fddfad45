"""A script for fish: a line for each word and each option, with when it may follow."""

from __future__ import annotations

from collections.abc import Iterator

from .grammar import Command, Grammar, Option

_BEGIN = """\
function __gtopk_just --description 'These words are typed, and no others'
    set -l typed (commandline -opc)
    test "$typed[2..]" = "$argv"
end
function __gtopk_after --description 'What is typed begins with these words'
    set -l typed (commandline -opc)
    string match -q -- "$argv *" "$typed[2..] "
end
"""

# Of a command that hands on what follows its argument.
_OWN = """\
function __gtopk_own_{command} --description 'What is typed after gtopk {command} is its own'
    set -l typed (commandline -opc)
    test "$typed[2]" = {command}; or return 1
    set -e typed[1..2]
    while set -q typed[1]
        switch $typed[1]
            case {takes_value}
                set -e typed[1]
            case '-*'
            case '*'
                return 1
        end
        set -e typed[1]
    end
end
"""


def script(grammar: Grammar) -> str:
    """Return the script."""
    return "\n".join([_BEGIN + "complete -c gtopk -f", *_lines(grammar)]) + "\n"


def _lines(grammar: Grammar) -> Iterator[str]:
    for command, follows in grammar.items():
        just, after = f"__gtopk_just {command}".strip(), f"__gtopk_after {command}"
        if follows.hands_on:
            yield _own(command, follows)
        if follows.takes_file:
            yield _line(after, "-F")
        for word, meaning in follows.words.items():
            yield _line(just, f"-a {word}", meaning)
        own = f"__gtopk_own_{command}" if follows.hands_on else after
        for option in follows.options:
            yield _line(own if command else just, _option(option), option.meaning)


def _line(condition: str, offered: str, meaning: str = "") -> str:
    described = meaning.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c gtopk -n '{condition}' {offered}" + (
        f" -d '{described}'" if meaning else ""
    )


def _option(option: Option) -> str:
    names = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
    ]
    if option.choices:
        names.append(f"-x -a '{' '.join(option.choices)}'")
    elif option.takes_value:
        names.append("-r -F" if option.is_file else "-x")
    return " ".join(names)


def _own(command: str, follows: Command) -> str:
    takes_value = [
        name for option in follows.options if option.takes_value for name in option.names
    ]
    return _OWN.format(command=command, takes_value=" ".join(takes_value)).rstrip()
