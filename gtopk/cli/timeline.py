"""`gtopk timeline`: merges the traces of all ranks into one, on rank 0's clock.

a trace of a rank            in that of all
process 1  allreduce.a       process 0  rank 0 (host a)    thread 1  allreduce.a
process 2  steps of w                                      thread 2  steps of w
                             process 1  rank 1 (host b)    ...
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..telemetry.timeline import RANK
from ..units import seconds_text
from .arguments import Command, fail, output_file

_PATTERN: Final = "timeline-*.json"

Record = dict[str, Any]


class Trace(NamedTuple):
    """A rank's trace.

    run: identifies its run, of `ranks` ranks; a later run has a greater number.
    began_seconds: on rank 0's clock, plus or minus uncertain_seconds.
    """

    rank: int
    ranks: int
    run: float
    host: str
    began_seconds: float
    uncertain_seconds: float
    records: list[Record]


def parser() -> Command:
    """Return the command line's grammar."""
    described = Command(
        "gtopk timeline",
        "Merge the traces of all ranks, on rank 0's clock, for chrome://tracing or "
        "ui.perfetto.dev. Ranks write traces when GTOPK_TIMELINE=FOLDER is set.",
        "GTOPK_TIMELINE=traces gtopk run -n 4 train.py\n  gtopk timeline traces --out trace.json",
    )
    traces = "folder with the ranks' traces"
    described.add_argument("folder", type=Path, metavar="FOLDER", help=traces)
    out = "trace to write; default: timeline.json in FOLDER"
    described.option("--out", output_file, None, out, metavar="FILE")
    described.flag("--json", "print what was done as JSON")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the trace, print its path, and return the exit code."""
    options = parser().parse_args(arguments)
    out = options.out or options.folder / "timeline.json"
    try:
        found = read_traces(options.folder)
        # A folder may hold files of a run with more ranks, from before: times would mix.
        last = max(trace.run for trace in found)
        traces = [trace for trace in found if trace.run == last]
        records = list(merged(traces))
        out.write_text(json.dumps(records) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        return fail("timeline", error)
    if earlier := [str(trace.rank) for trace in found if trace.run != last]:
        whose = f"rank{'s' * (len(earlier) > 1)} {', '.join(earlier)}"
        print(f"gtopk timeline: {whose}: of an earlier run, and left out", file=sys.stderr)
    uncertain = max(trace.uncertain_seconds for trace in traces)
    if options.json:
        said = {"trace": str(out), "ranks": [trace.rank for trace in traces]}
        print(json.dumps({**said, "records": len(records), "clocks_within_seconds": uncertain}))
        return 0
    within = f", clocks alike to within {seconds_text(uncertain)}" if uncertain else ""
    of = f" of {traces[0].ranks}" if len(traces) < traces[0].ranks else ""
    ranks = f"{len(traces)}{of} rank{'s' * (bool(of) or len(traces) > 1)}"
    print(f"{out}: {ranks}, {len(records)} records{within}")
    return 0


def read_traces(folder: Path) -> list[Trace]:
    """Return the ranks' traces; raise ValueError without any, or where a file is no gtopk trace.

    The trace of a killed rank, without an end, is read as far as it goes.
    """
    paths = sorted(folder.glob(_PATTERN))
    if not paths:
        raise ValueError(
            f"'{folder}' must hold ranks' traces, files named {_PATTERN}, and has none: "
            "write them with `gtopk run --timeline FOLDER`, or with GTOPK_TIMELINE=FOLDER in the "
            "job's environment"
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> Trace:
    records = list(_records(path.read_text(encoding="utf-8", errors="replace")))
    try:
        whose = next(each["args"] for each in records if each.get("name") == RANK)
        return Trace(
            int(whose["rank"]),
            # Earlier versions did not write it.
            int(whose.get("ranks", 0)),
            _finite(whose.get("run", 0.0)),
            str(whose["host"]),
            _finite(whose["began_seconds"]),
            _finite(whose["uncertain_seconds"]),
            [each for each in records if _is_shown(each)],
        )
    except (AttributeError, KeyError, OverflowError, StopIteration, TypeError, ValueError):
        raise ValueError(
            f"'{path}' does not say whose trace it is: only those that GTOPK_TIMELINE asks for can "
            "be put together"
        ) from None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("must be finite")
    return number


def _is_shown(record: Record) -> bool:
    """Tell whether a trace shows a record; not one that is empty, damaged or without a row."""
    return (
        isinstance(record.get("ph"), str)
        and record.get("name") != RANK
        and isinstance(record.get("name", ""), str)
        and isinstance(record.get("ts", 0), (int, float))
    )


def _records(text: str) -> Iterator[Record]:
    """Yield the records of a trace, one for each line without the brackets."""
    # Line by line: the trace of a killed rank may end in the middle of one, and is no JSON.
    for line in text.splitlines():
        try:
            record = json.loads(line.strip(" ,[]") or "{}")
        except (ValueError, RecursionError):
            # The line in which a rank was killed, or nonsense.
            continue
        if isinstance(record, dict):
            yield record


def merged(traces: Sequence[Trace]) -> Iterator[Record]:
    """Yield the records of all traces, with times on rank 0's clock since the first begin."""
    began = min(trace.began_seconds for trace in traces)
    for trace in traces:
        place = {"pid": trace.rank, "tid": 0}
        name = f"rank {trace.rank} ({trace.host})"
        yield {"ph": "M", "name": "process_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": trace.rank}}
        later_microseconds = 1e6 * (trace.began_seconds - began)
        for record in trace.records:
            moved = {**record, "pid": trace.rank}
            # A rank's rows become threads, as the rank itself is a process of the merged trace.
            if record["ph"] == "M":
                moved["name"] = record.get("name", "").replace("process", "thread")
            # A global mark would cross the rows of all ranks.
            if record.get("s") == "g":
                moved["s"] = "p"
            if "ts" in record:
                moved["ts"] = round(record["ts"] + later_microseconds, 1)
            yield moved
