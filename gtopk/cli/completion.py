"""`gtopk completion`: a script with which bash, zsh or fish complete the command's words.

It is made from the parsers of all commands, once for each version of gtopk. The script of bash
walks the words before the cursor as the command's own parser does, that of zsh has a call of
`_arguments` for each command, and that of fish a line for each word and option.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Final, NamedTuple


class Option(NamedTuple):
    """An option of a command.

    names:       ("-n", "--ranks")
    takes_value: whether the next word is its own.
    choices:     of that word.
    is_file:     that word is one, as far as can be told.
    """

    names: tuple[str, ...]
    meaning: str = ""
    takes_value: bool = False
    choices: tuple[str, ...] = ()
    is_file: bool = False


class Command(NamedTuple):
    """The options and words that may follow a command.

    words:      with their meanings: further commands, or choices of its argument.
    takes_file: its argument is a file.
    hands_on:   all that follows its argument is for somebody else.
    """

    options: tuple[Option, ...]
    words: Mapping[str, str] = {}
    takes_file: bool = False
    hands_on: bool = False


# By command: "" for the words after `gtopk`, "run", "bench", "bench wire".
Grammar = Mapping[str, Command]

HELP: Final = Option(("--help",), "tell more")


def command_of(described: argparse.ArgumentParser) -> Command:
    """Return what may follow a command whose arguments are parsed so."""
    formatter = described._get_formatter()
    options, words, takes_file, hands_on = [], dict[str, str](), False, False
    for action in described._actions:
        choices = tuple(map(str, action.choices or ()))
        # What is taken as it is may be a file; all else is made a number or the like.
        is_file = action.nargs != 0 and not choices and action.type in (None, Path)
        if action.option_strings:
            meaning = formatter._expand_help(action) if action.help else ""
            names = tuple(action.option_strings)
            options.append(Option(names, meaning, action.nargs != 0, choices, is_file))
        else:
            words |= dict.fromkeys(choices, "")
            takes_file |= is_file
            hands_on |= action.nargs == argparse.REMAINDER
    return Command(tuple(options), words, takes_file, hands_on)


# Files are left to bash (compopt), which knows of ~ and of spaces in names.
_BASH = """\
_gtopk() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command='' option='' word
    local words='' options='' files=''
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        # --model=lstm is three words to bash.
        if [ "$word" = = ]; then continue; fi
        if [ -n "$option" ]; then option=''; continue; fi
        case "$command/$word" in
{steps}
        esac
    done
    if [ "$current" = = ]; then current=''; fi
    case "$command/$option" in
{offers}
    esac
    if [ -z "$option" ] && {{ [ -z "$words$files" ] || [[ "$current" = -* ]]; }}; then
        words="$options" files=''
    fi
    if [ -n "$files" ]; then compopt -o default; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -F _gtopk gtopk
"""


def _bash(grammar: Grammar) -> str:
    """Return the script."""
    return _BASH.format(
        steps=_bash_arms(_bash_steps(grammar)), offers=_bash_arms(_bash_offers(grammar))
    )


def _bash_arms(arms: Iterable[tuple[list[str], str]]) -> str:
    """Return the arms of a `case`: patterns, and what is done; without a pattern there is none."""
    return "\n".join(f"        {'|'.join(where)}) {does} ;;" for where, does in arms if where)


def _bash_steps(grammar: Grammar) -> Iterator[tuple[list[str], str]]:
    """Return what a word before the cursor means: patterns of "command/word"."""
    each = list(grammar.items())
    commands = [name.rpartition(" ") for name in grammar if name]
    yield (
        [f"'{above}/{word}'" for above, _, word in commands],
        'command="${command:+$command }$word"',
    )
    taking = [(name, option) for name, follows in each for option in follows.options]
    yield (
        [
            f"'{name}/{word}'"
            for name, option in taking
            if option.takes_value
            for word in option.names
        ],
        'option="$word"',
    )
    yield ["*/-*"], ":"
    # What follows a script is the script's.
    yield (
        [f"'{name}/'*" for name, follows in each if follows.hands_on],
        "compopt -o default; return",
    )


def _bash_offers(grammar: Grammar) -> Iterator[tuple[list[str], str]]:
    """Return what there is to choose from at the cursor: patterns of "command/option"."""
    for name, follows in grammar.items():
        options = " ".join(word for option in follows.options for word in option.names)
        offered = f"options='{options}' words='{' '.join(follows.words)}'"
        yield [f"'{name}/'"], f"files=yes {offered}" if follows.takes_file else offered
        for option in follows.options:
            where = [f"'{name}/{word}'" for word in option.names]
            if option.is_file:
                yield where, "files=yes"
            elif option.choices:
                yield where, f"words='{' '.join(option.choices)}'"


# Completion needs compinit, which a ~/.zshrc that sources this need not have called. Put into a
# folder of $fpath, as _gtopk, it is compinit that reads it.
_ZSH = """\
#compdef gtopk
_gtopk() {{
    local place=gtopk
    local -a places=({places}) choices
    while (( CURRENT > 2 && ${{places[(Ie)$place ${{words[2]}}]}} )); do
        place="$place ${{words[2]}}"
        shift words
        (( CURRENT-- ))
    done
    case $place in
{cases}
    esac
}}
if [[ ${{funcstack[1]}} = _gtopk ]]; then
    _gtopk "$@"
else
    (( ${{+functions[compdef]}} )) || {{ autoload -Uz compinit && compinit }}
    compdef _gtopk gtopk
fi
"""


def _zsh(grammar: Grammar) -> str:
    """Return the script."""
    places = {command: f"gtopk {command}".strip() for command in grammar}
    cases = (
        f"    ({quote(places[command])})\n{_zsh_case(follows)} ;;"
        for command, follows in grammar.items()
    )
    return _ZSH.format(places=" ".join(map(quote, places.values())), cases="\n".join(cases))


def _zsh_case(follows: Command) -> str:
    lines = []
    if follows.words:
        words = (
            f"{word}:{meaning}" if meaning else word for word, meaning in follows.words.items()
        )
        lines.append(f"choices=({' '.join(map(quote, words))})")
    # Options may follow the argument, but for a command that hands on all that does.
    lines.append(
        "_arguments -s "
        + " ".join(["-A '-*'"] * follows.hands_on + [*_zsh_specifications(follows)])
    )
    return "\n".join(f"        {line}" for line in lines)


def _zsh_specifications(follows: Command) -> Iterator[str]:
    for option in follows.options:
        others = f"({' '.join(option.names)})" if len(option.names) > 1 else ""
        for name in option.names:
            attached = ("=" if name.startswith("--") else "+") if option.takes_value else ""
            meaning = f"[{_zsh_escaped(option.meaning)}]" if option.meaning else ""
            yield quote(f"{others}{name}{attached}{meaning}{_zsh_value(option)}")
    if follows.words:
        yield "': :{_describe word choices}'"
    elif follows.takes_file:
        yield "'*:file:_files'"


def _zsh_value(option: Option) -> str:
    if not option.takes_value:
        return ""
    if option.choices:
        return f":value:({' '.join(option.choices)})"
    return ":file:_files" if option.is_file else ":value:"


def _zsh_escaped(meaning: str) -> str:
    for special in "\\[]:":
        meaning = meaning.replace(special, f"\\{special}")
    return meaning


_FISH = """\
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
_FISH_OWN = """\
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


def _fish(grammar: Grammar) -> str:
    """Return the script."""
    return "\n".join([_FISH + "complete -c gtopk -f", *_fish_lines(grammar)]) + "\n"


def _fish_lines(grammar: Grammar) -> Iterator[str]:
    for command, follows in grammar.items():
        just, after = f"__gtopk_just {command}".strip(), f"__gtopk_after {command}"
        if follows.hands_on:
            yield _fish_own(command, follows)
        if follows.takes_file:
            yield _fish_line(after, "-F")
        for word, meaning in follows.words.items():
            yield _fish_line(just, f"-a {word}", meaning)
        own = f"__gtopk_own_{command}" if follows.hands_on else after
        for option in follows.options:
            yield _fish_line(own if command else just, _fish_option(option), option.meaning)


def _fish_line(condition: str, offered: str, meaning: str = "") -> str:
    described = meaning.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c gtopk -n '{condition}' {offered}" + (
        f" -d '{described}'" if meaning else ""
    )


def _fish_option(option: Option) -> str:
    names = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
    ]
    if option.choices:
        names.append(f"-x -a '{' '.join(option.choices)}'")
    elif option.takes_value:
        names.append("-r -F" if option.is_file else "-x")
    return " ".join(names)


def _fish_own(command: str, follows: Command) -> str:
    takes_value = [
        name for option in follows.options if option.takes_value for name in option.names
    ]
    return _FISH_OWN.format(command=command, takes_value=" ".join(takes_value)).rstrip()


_SCRIPTS: Final[dict[str, Callable[[Grammar], str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
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
