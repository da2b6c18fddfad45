"""A script for bash: it walks the words before the cursor as the command's own parser does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .grammar import Grammar

# Files are left to bash (compopt), which knows of ~ and of spaces in names.
_SCRIPT = """\
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


def script(grammar: Grammar) -> str:
    """Return the script."""
    return _SCRIPT.format(steps=_arms(_steps(grammar)), offers=_arms(_offers(grammar)))


def _arms(arms: Iterable[tuple[list[str], str]]) -> str:
    """Return the arms of a `case`: patterns, and what is done; without a pattern there is none."""
    return "\n".join(f"        {'|'.join(where)}) {does} ;;" for where, does in arms if where)


def _steps(grammar: Grammar) -> Iterator[tuple[list[str], str]]:
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


def _offers(grammar: Grammar) -> Iterator[tuple[list[str], str]]:
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
