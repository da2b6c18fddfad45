"""The lines of a run's record: JSON objects, with their kind in "what".

    begin     the rank, its host and the time: the first line, and again when the ranks rejoin;
              "every": N, if only every Nth step is written;
              "again": it continues the run of the previous "begin", in the same world
    resumed   the run resumes from this step; the lines before belong to it, too
    step      a StepReport
    withheld  at some steps: the norm of the residual, and its age in steps
    parted    parameters that differed between ranks, and whether they were repaired
    score     at some steps: this rank's computing speed relative to the fastest rank's
    values    values that the script has logged; null for one that was not finite
    message   a log message of the library
    end       how this rank left, and whether "in_order"

Each line has "step", the library's count of steps. Each but "begin" has "seconds" since its
"begin", on rank 0's clock. A "begin" has "began_unix_seconds", the same on all ranks that began
together. If the writer was killed, a file may end in the middle of a line.

A record may be damaged, or written by another program. `validated` checks each line once.
Readers get the valid lines, and the number of invalid ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from .step_report import StepReport

FORMAT: Final = 1
_DIGITS: Final = 7  # a tenth of a microsecond

Line = dict[str, Any]

_FIELDS: Final = {field.name: field.default for field in dataclasses.fields(StepReport)}


def path_of(folder: str | Path, rank: int) -> Path:
    """Return the path of a rank's file in a run's folder."""
    return Path(folder, f"rank-{rank:05d}.jsonl")


def rank_of(path: Path) -> int | None:
    """Return the rank that a file in a run's folder belongs to; None for other files."""
    digits = path.name.removeprefix("rank-").removesuffix(".jsonl")
    return (
        int(digits) if digits.isdecimal() and path.name == path_of("", int(digits)).name else None
    )


def step_line(report: StepReport, seconds: float, bytes_so_far: int, samples_so_far: int) -> Line:
    """Return a step as a line; ..._so_far: this rank's totals, including steps without a line."""
    counted = {"bytes_so_far": bytes_so_far, "samples_so_far": samples_so_far}
    fields = {name: getattr(report, name) for name in _FIELDS}
    return {"what": "step", "seconds": seconds, **counted, **fields}


def report_of(line: Line) -> StepReport:
    """Return the step of a line; raise KeyError if a field is missing.

    Fields that earlier versions did not write get their defaults.
    """
    fields = {
        name: line[name]
        for name, default in _FIELDS.items()
        if name in line or default is dataclasses.MISSING
    }
    return StepReport(**fields)


def left_in_order(end: Line) -> bool:
    """Tell whether a rank left in order; earlier versions wrote only a text about it."""
    in_order = "failed" not in end["how"] and "stopped" not in end["how"]
    return bool(end.get("in_order", in_order))


def as_text(line: Line) -> str:
    """Return a line as the text that is written to a file."""
    return json.dumps({name: _rounded(value) for name, value in line.items()}) + "\n"


def _rounded(value: Any) -> Any:
    """Return a value without insignificant digits, and with null for floats that JSON lacks."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return round(value, _DIGITS) if abs(value) >= 1 else float(f"{value:.{_DIGITS}g}")


# The files' names have five digits for the rank.
MOST_RANKS: Final = 100_000
_MAX_COUNT: Final = 10**18  # bytes, steps, entries
_LONGEST_SECONDS: Final = 1e12
_LAST_DATE: Final = 250e9  # seconds since 1970: in the year 9892
# Sums of larger values overflow, so they are treated as not finite.
LARGEST_VALUE: Final = 1e300
# Control characters of terminals and of text direction, and surrogates, which cannot be encoded.
_CONTROL_CHARACTERS: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

Check = Callable[[Any], bool]


# Uses `type`, not isinstance: True must not pass for a count of 1.
def _is_count(value: Any) -> bool:
    # Python's integers are unbounded, and large ones would overflow in float arithmetic.
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_number(value: Any) -> bool:
    # False for NaN, too.
    return type(value) in (int, float) and abs(value) <= _LONGEST_SECONDS


def _is_date(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= _LAST_DATE


def _of_type(kind: type) -> Check:
    return lambda value: type(value) is kind


_is_text, _is_bool = _of_type(str), _of_type(bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_value(value: Any) -> bool:
    """Tell whether this is a number of any size, or None; diverging runs log such values."""
    return type(value) in (int, float, type(None))


def _are_values(value: Any) -> bool:
    return isinstance(value, dict) and all(name and _is_value(each) for name, each in value.items())


_CHECKS_BY_TYPE: Final[Mapping[str, Check]] = {
    "int": _is_count,
    "float": _is_number,
    "bool": _is_bool,
    "str": _is_text,
    "int | None": _or_none(_is_count),
    "float | None": _or_none(_is_number),
}


def _report_checks(required: bool) -> dict[str, Check]:
    """Return the checks of a StepReport's required fields, or of the optional ones."""
    return {
        each.name: _CHECKS_BY_TYPE[str(each.type)]
        for each in dataclasses.fields(StepReport)
        if (each.default is dataclasses.MISSING) == required
    }


# By kind of line: the required fields and the optional ones.
_SCHEMA: Final[Mapping[str, tuple[Mapping[str, Check], Mapping[str, Check]]]] = {
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
        {"bytes_so_far": _is_count, **_report_checks(required=True)},
        {
            "samples_so_far": _is_count,
            **_report_checks(required=False),
            "covers": lambda value: _is_text(value) and value != "",
            "gradient_norm": _is_value,
        },
    ),
    "resumed": ({"step": _is_count}, {}),
    "withheld": ({"step": _is_count, "norm": _is_value, "age_steps": _is_value}, {}),
    "score": ({"step": _is_count, "score": _or_none(_is_number)}, {}),
    "values": ({"step": _is_count, "values": _are_values}, {}),
    "message": ({"step": _is_count, "text": _is_text}, {"level": _is_text}),
    "end": ({"how": _is_text}, {"in_order": _is_bool}),
}


def validated(line: Line, rank: int | None) -> Line | None:
    """Return a line that is safe to show, or None for one that gtopk cannot have written.

    Texts are made safe with `shown`. A line of an unknown kind keeps its fields.
    rank: the rank that the file belongs to.
    """
    what = line["what"]
    if not isinstance(what, str):
        return None
    line = shown(line)
    required, optional = _SCHEMA.get(what, ({}, {}))
    if what != "begin" and not _is_number(line.get("seconds")):
        return None
    # An unknown kind has no checks here and passes: a later version's record is shown in part.
    if not all(name in line and check(line[name]) for name, check in required.items()):
        return None
    if not all(check(line[name]) for name, check in optional.items() if name in line):
        return None
    # Reject a copy under another rank's name, which would count its steps twice.
    if what == "begin" and not line["rank"] == rank < line["ranks"]:
        return None
    if what == "values":
        line["values"] = {name: _bounded(value) for name, value in line["values"].items()}
    if what == "step" and "gradient_norm" in line:
        line["gradient_norm"] = _bounded(line["gradient_norm"])
    if what == "withheld":
        line |= {name: _bounded(line[name]) for name in ("norm", "age_steps")}
    return line


def _bounded(value: float | None) -> float | None:
    return None if value is None or not abs(value) <= LARGEST_VALUE else value


def shown(value: Any) -> Any:
    """Make a value's texts single lines that cannot control a terminal or a page.

    Tabs and line ends become spaces; other control characters are escaped.
    """
    if isinstance(value, str):
        return _sanitized(value)
    if isinstance(value, dict):
        return {_sanitized(name): shown(each) for name, each in value.items()}
    return [shown(each) for each in value] if isinstance(value, list) else value


# Lines share a few names: the cache keeps one string for each.
@lru_cache(1 << 12)
def _sanitized(text: str) -> str:
    return _CONTROL_CHARACTERS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return " " if found[0] in "\t\n" else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
