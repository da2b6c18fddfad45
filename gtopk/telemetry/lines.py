"""Lines: what a run's record is made of, each a JSON object with "what" it is.

    begin     who this rank is, where and when: the first line, and again where ranks meet anew;
              "every": of so many steps it writes one;
              "again": in the same world as the one before it, whose run this is
    resumed   what was written before is of this run, too: it goes on from there, at this step
    step      a StepReport
    withheld  norm of the residual, and how many steps it is worth, now and then
    parted    parameters that were not the same on all ranks, and whether they were healed
    score     how fast this rank computes beside the fastest, now and then
    values    what the script has logged; null for what was not finite
    message   what the library has said
    end       how this rank left, and whether "in_order"

Each has "step", as the library counts them, and each but "begin" has "seconds" since its "begin",
on rank 0's clock; a "begin" has "began_unix_seconds", the same on all ranks that began together. A
file whose writer was killed may end in the middle of a line.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Final

from .step_report import StepReport

FORMAT: Final = 1
_DIGITS: Final = 7  # a tenth of a microsecond

Line = dict[str, Any]

_FIELDS: Final = {field.name: field.default for field in dataclasses.fields(StepReport)}


def path_of(folder: str | Path, rank: int) -> Path:
    """Return a rank's file in a run's folder."""
    return Path(folder, f"rank-{rank:05d}.jsonl")


def rank_of(path: Path) -> int | None:
    """Return whose file in a run's folder this is; None for a file of no rank."""
    digits = path.name.removeprefix("rank-").removesuffix(".jsonl")
    return (
        int(digits) if digits.isdecimal() and path.name == path_of("", int(digits)).name else None
    )


def step_line(report: StepReport, seconds: float, bytes_so_far: int, samples_so_far: int) -> Line:
    """Return a step as a line; ..._so_far: of all this rank's steps, also those without a line."""
    counted = {"bytes_so_far": bytes_so_far, "samples_so_far": samples_so_far}
    fields = {name: getattr(report, name) for name in _FIELDS}
    return {"what": "step", "seconds": seconds, **counted, **fields}


def report_of(line: Line) -> StepReport:
    """Return the step of a line; raise KeyError where it lacks something.

    What a step did not say in earlier versions is as it was then: the field's default.
    """
    known = {
        name: line[name]
        for name, default in _FIELDS.items()
        if name in line or default is dataclasses.MISSING
    }
    return StepReport(**known)


def left_in_order(end: Line) -> bool:
    """Tell whether a rank left in order; in earlier versions the words alone told."""
    in_order = "failed" not in end["how"] and "stopped" not in end["how"]
    return bool(end.get("in_order", in_order))


def as_text(line: Line) -> str:
    """Return a line as it stands in a file."""
    return json.dumps({name: _short(value) for name, value in line.items()}) + "\n"


def _short(value: Any) -> Any:
    """Return a value without digits that say nothing, and without what JSON cannot say."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return round(value, _DIGITS) if abs(value) >= 1 else float(f"{value:.{_DIGITS}g}")
