"""Soundness: whether a line of a record is one that gtopk writes, so that no reader trips over it.

A record may be damaged, or somebody else's: what its lines hold is checked once, where they are
read. Of other lines there is a count, and nothing else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from .lines import Line
from .step_report import StepReport

MOST_RANKS: Final = 100_000  # as many as the files' names have digits for
_MOST: Final = 10**18  # bytes, steps, entries
_LONGEST_SECONDS: Final = 1e12
_LAST_DATE: Final = 250e9  # seconds since 1970: in the year 9892
# Larger ones overflow where they are added up: they pass for what was not finite.
_LARGEST_VALUE: Final = 1e300
# Of a terminal; of the direction that text runs in; halves of characters, which no encoding takes.
_STEERING: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LONGEST_SECONDS  # NaN is not


def _is_date(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= _LAST_DATE


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_name(value: Any) -> bool:
    return _is_text(value) and value != ""


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _are_values(value: Any) -> bool:
    return isinstance(value, dict) and all(
        name and type(each) in (int, float, type(None)) for name, each in value.items()
    )


_OF_TYPES: Final[Mapping[str, Check]] = {
    "int": _is_count,
    "float": _is_number,
    "bool": _is_bool,
    "str": _is_text,
    "int | None": _or_none(_is_count),
    "float | None": _or_none(_is_number),
}
# By what a line is: what it holds, and what it may hold besides.
_HOLDS: Final[Mapping[str, tuple[Mapping[str, Check], Mapping[str, Check]]]] = {
    "begin": (
        {
            "rank": _is_count,
            "ranks": lambda value: _is_count(value) and 1 <= value <= MOST_RANKS,
            "step": _is_count,
            "seconds": _is_number,
            "unix_seconds": _is_date,
            **dict.fromkeys(("host", "processor", "transport", "library"), _is_text),
            **dict.fromkeys(("gtopk", "torch", "python"), _is_text),
            "clock_uncertain_seconds": _is_number,
        },
        {
            "every": lambda value: _is_count(value) and value >= 1,
            "again": _is_bool,
            "link": _is_text,
            "began_unix_seconds": _or_none(_is_date),
        },
    ),
    "step": (
        {
            "bytes_so_far": _is_count,
            **{
                each.name: _OF_TYPES[str(each.type)]
                for each in dataclasses.fields(StepReport)
                if each.default is dataclasses.MISSING
            },
        },
        {
            "samples_so_far": _is_count,
            **{
                each.name: _OF_TYPES[str(each.type)]
                for each in dataclasses.fields(StepReport)
                if each.default is not dataclasses.MISSING
            },
            "covers": _is_name,
        },
    ),
    "resumed": ({"step": _is_count}, {}),
    "withheld": (
        {"step": _is_count, "norm": _or_none(_is_number), "age_steps": _or_none(_is_number)},
        {},
    ),
    "score": ({"step": _is_count, "score": _or_none(_is_number)}, {}),
    "values": ({"step": _is_count, "values": _are_values}, {}),
    "message": ({"step": _is_count, "text": _is_text}, {"level": _is_text}),
    "end": ({"how": _is_text}, {"in_order": _is_bool}),
}


def sound(line: Line, rank: int | None) -> Line | None:
    """Return a line as it can be shown, or None for one that gtopk has not written.

    rank: whose file it is in. Its texts are as `shown` has them; a line of a kind that this version
    does not know is as it is.
    """
    what = line["what"]
    if not isinstance(what, str):
        return None
    line = shown(line)
    holds, may_hold = _HOLDS.get(what, ({}, {}))
    if what != "begin" and not _is_number(line.get("seconds")):
        return None
    if not all(name in line and check(line[name]) for name, check in holds.items()):
        return None
    if not all(check(line[name]) for name, check in may_hold.items() if name in line):
        return None
    if what == "begin" and not line["rank"] == rank < line["ranks"]:
        return None
    if what == "values":
        line["values"] = {name: _within(value) for name, value in line["values"].items()}
    return line


def _within(value: float | None) -> float | None:
    return None if value is None or not abs(value) <= _LARGEST_VALUE else value


def shown(value: Any) -> Any:
    """Return a value whose texts are of one line and steer no terminal and no page.

    Tabs and ends of lines become spaces; what else would steer one is escaped.
    """
    if isinstance(value, str):
        return _steady(value)
    if isinstance(value, dict):
        return {_steady(name): shown(each) for name, each in value.items()}
    return [shown(each) for each in value] if isinstance(value, list) else value


@lru_cache(1 << 12)  # the names in all lines are the same few: one text each, not one a line
def _steady(text: str) -> str:
    return _STEERING.sub(_spelt, text)


def _spelt(found: re.Match[str]) -> str:
    code = ord(found[0])
    return " " if found[0] in "\t\n" else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
