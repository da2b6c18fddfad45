"""`gtopk timeline`: merge the traces of all ranks into one, on rank 0's clock.

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
from ..units import counted, seconds_text
from .arguments import Command, fail, output_file

_PATTERN: Final = "timeline-*.json"

Record = dict[str, Any]


class Trace(NamedTuple):
    """A rank's trace.

    ranks: number of ranks in the run; 0 if unknown.
    run: identifies the run; a later run has a greater number.
    began_seconds: start on rank 0's clock, plus or minus uncertain_seconds.
    """

    rank: int
    ranks: int
    run: float
    host: str
    began_seconds: float
    uncertain_seconds: float
    records: list[Record]


def parser() -> Command:
    """Return the argument parser."""
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
        # Skip files of an earlier run with more ranks, which may remain in the folder.
        last = max(trace.run for trace in found)
        traces = [trace for trace in found if trace.run == last]
        records = list(merged(traces))
        out.write_text(json.dumps(records) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        return fail("timeline", error)
    if earlier := [str(trace.rank) for trace in found if trace.run != last]:
        ranks_text = f"rank{'s' * (len(earlier) > 1)} {', '.join(earlier)}"
        print(f"gtopk timeline: left out {ranks_text}, from an earlier run", file=sys.stderr)
    uncertain = max(trace.uncertain_seconds for trace in traces)
    if options.json:
        summary = {"trace": str(out), "ranks": [trace.rank for trace in traces]}
        print(json.dumps({**summary, "records": len(records), "clocks_within_seconds": uncertain}))
        return 0
    within = f", clocks equal to within {seconds_text(uncertain)}" if uncertain else ""
    of = f" of {traces[0].ranks}" if len(traces) < traces[0].ranks else ""
    ranks = f"{len(traces)}{of} rank{'s' * (bool(of) or len(traces) > 1)}"
    print(f"{out}: {ranks}, {counted(len(records), 'record')}{within}")
    return 0


def read_traces(folder: Path) -> list[Trace]:
    """Return the ranks' traces, including the incomplete trace of a killed rank.

    Raises ValueError if there are none, or if a file is not a gtopk trace.
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
        header = next(each["args"] for each in records if each.get("name") == RANK)
        return Trace(
            int(header["rank"]),
            # Missing in traces of earlier versions.
            int(header.get("ranks", 0)),
            _finite(header.get("run", 0.0)),
            str(header["host"]),
            _finite(header["began_seconds"]),
            _finite(header["uncertain_seconds"]),
            [each for each in records if _is_shown(each)],
        )
    except (AttributeError, KeyError, OverflowError, StopIteration, TypeError, ValueError):
        raise ValueError(
            f"'{path}' does not name its rank: only traces that were written with GTOPK_TIMELINE "
            "can be merged"
        ) from None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("must be finite")
    return number


def _is_shown(record: Record) -> bool:
    """Tell whether to show a record: not if it is damaged or identifies the rank."""
    return (
        isinstance(record.get("ph"), str)
        and record.get("name") != RANK
        and isinstance(record.get("name", ""), str)
        and isinstance(record.get("ts", 0), (int, float))
    )


def _records(text: str) -> Iterator[Record]:
    """Yield the records of a trace, one per line."""
    # Parse each line separately: a killed rank's trace ends in mid-record and is not valid JSON.
    for line in text.splitlines():
        try:
            record = json.loads(line.strip(" ,[]") or "{}")
        except (ValueError, RecursionError):
            # An incomplete last line, or garbage.
            continue
        if isinstance(record, dict):
            yield record


def merged(traces: Sequence[Trace]) -> Iterator[Record]:
    """Yield the records of all traces; times are on rank 0's clock, from the earliest start."""
    began = min(trace.began_seconds for trace in traces)
    for trace in traces:
        place = {"pid": trace.rank, "tid": 0}
        name = f"rank {trace.rank} ({trace.host})"
        yield {"ph": "M", "name": "process_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": trace.rank}}
        later_microseconds = 1e6 * (trace.began_seconds - began)
        for record in trace.records:
            moved = {**record, "pid": trace.rank}
            # In the merged trace a rank is a process, so its own processes become threads.
            if record["ph"] == "M":
                moved["name"] = record.get("name", "").replace("process", "thread")
            # Limit global marks to this rank's process, or they would cross the rows of all ranks.
            if record.get("s") == "g":
                moved["s"] = "p"
            if "ts" in record:
                moved["ts"] = round(record["ts"] + later_microseconds, 1)
            yield moved
