"""What may follow each command, taken from the parser of its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
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
    """What may follow a command.

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
