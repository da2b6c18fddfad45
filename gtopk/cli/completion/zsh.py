"""A script for zsh: a call of its `_arguments` for each command."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from .grammar import Command, Grammar, Option

# Completion needs compinit, which a ~/.zshrc that sources this need not have called. Put into a
# folder of $fpath, as _gtopk, it is compinit that reads it.
_SCRIPT = """\
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


def script(grammar: Grammar) -> str:
    """Return the script."""
    places = {command: f"gtopk {command}".strip() for command in grammar}
    cases = (
        f"    ({quote(places[command])})\n{_case(follows)} ;;"
        for command, follows in grammar.items()
    )
    return _SCRIPT.format(places=" ".join(map(quote, places.values())), cases="\n".join(cases))


def _case(follows: Command) -> str:
    lines = []
    if follows.words:
        words = (
            f"{word}:{meaning}" if meaning else word for word, meaning in follows.words.items()
        )
        lines.append(f"choices=({' '.join(map(quote, words))})")
    # Options may follow the argument, but for a command that hands on all that does.
    lines.append(
        "_arguments -s " + " ".join(["-A '-*'"] * follows.hands_on + [*_specifications(follows)])
    )
    return "\n".join(f"        {line}" for line in lines)


def _specifications(follows: Command) -> Iterator[str]:
    for option in follows.options:
        others = f"({' '.join(option.names)})" if len(option.names) > 1 else ""
        for name in option.names:
            attached = ("=" if name.startswith("--") else "+") if option.takes_value else ""
            meaning = f"[{_escaped(option.meaning)}]" if option.meaning else ""
            yield quote(f"{others}{name}{attached}{meaning}{_value(option)}")
    if follows.words:
        yield "': :{_describe word choices}'"
    elif follows.takes_file:
        yield "'*:file:_files'"


def _value(option: Option) -> str:
    if not option.takes_value:
        return ""
    if option.choices:
        return f":value:({' '.join(option.choices)})"
    return ":file:_files" if option.is_file else ":value:"


def _escaped(meaning: str) -> str:
    for special in "\\[]:":
        meaning = meaning.replace(special, f"\\{special}")
    return meaning
