"""Made-up records of runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gtopk.telemetry.lines import FORMAT, Line, as_text, path_of, step_line
from gtopk.telemetry.run_record import LineFile
from gtopk.telemetry.step_report import StepReport


def report(step: int = 0, **changes: Any) -> StepReport:
    """Return a step of 10 ms, 6 ms of it computing; all parts have different lengths."""
    fields: dict[str, Any] = {
        "step": step,
        "algorithm": "gtopk",
        "compute_seconds": 0.006,
        "synchronize_seconds": 0.004,
        "select_seconds": 0.0012,
        "apply_seconds": 0.0002,
        "communicate_seconds": 0.0021,
        "agree_seconds": 0.0003,
        "merge_seconds": 0.0007,
        "code_seconds": 0.0003,
        "hidden_seconds": 0.0,
        "working_seconds": 0.003,
        "buckets": 1,
        "exchange_seconds": 0.003,
        "predicted_seconds": 0.0025,
        "sent_bytes": 1200,
        "sent_messages": 2,
        "bytes_counted": True,
        "coded_entries": 200,
        "coded_bytes": 1200,
        "elements": 100_000,
        "samples": 32,
        "selected": 100,
        "updated": 100,
        "skipped": False,
    }
    return StepReport(**{**fields, **changes})


def begin(rank: int = 0, ranks: int = 3, **changes: Any) -> Line:
    return {
        "what": "begin",
        "format": FORMAT,
        "rank": rank,
        "ranks": ranks,
        "local_rank": rank,
        "step": 0,
        "every": 1,
        "again": False,
        "seconds": 100.0 + rank,  # on rank 0's clock
        "clock_uncertain_seconds": 0.0,
        "began_unix_seconds": changes.get("unix_seconds", 1.7e9),
        "unix_seconds": 1.7e9 + 10 * rank,  # calendars differ
        "host": f"host{rank // 2}",
        "pid": 1000 + rank,
        "processor": "a processor",
        "cores": 4,
        "transport": "mpi",
        "library": "Some MPI 1.0",
        "gtopk": "0.1.0",
        "torch": "2.0",
        "python": "3.11",
        **changes,
    }


def lines_of(rank: int, ranks: int, steps: int, **changes: Any) -> list[Line]:
    """Return a rank's lines: a step every 10 ms, residuals every 20, logged values, an end."""
    lines = [begin(rank, ranks)]
    for step in range(steps):
        seconds = 0.01 * (step + 1)
        step_report = report(step, **changes)
        lines.append(
            step_line(
                step_report, seconds, 1200 * (step + 1), (step_report.samples or 0) * (step + 1)
            )
        )
        at = {"seconds": seconds, "step": step + 1}
        lines.append({"what": "values", **at, "values": {"loss": 2.0 / (step + 1) + rank}})
        if step % 20 == 0:
            lines.append({"what": "withheld", **at, "norm": 1.0 + rank, "age_steps": 30.0})
            lines.append({"what": "score", **at, "score": 1 / (1 + rank)})
    at = {"seconds": 0.01 * steps, "step": steps}
    if rank == 0:
        lines.append({"what": "values", **at, "values": {"accuracy": 0.875}})
        lines.append({"what": "message", **at, "level": "INFO", "text": "<b>advice</b>"})
    lines.append({"what": "end", **at, "how": f"called shutdown() at step {steps}"})
    return lines


def write_run(folder: Path, ranks: int = 3, steps: int = 50, **changes: Any) -> Path:
    """Write the record of a run that ended normally."""
    for rank in range(ranks):
        file = LineFile(path_of(folder, rank))
        file.take(lines_of(rank, ranks, steps, **changes))
        file.close()
    return folder


def diverge(folder: Path, name: str, after: int = 0) -> None:
    """Make the values logged under a name NaN from a step on."""
    for path in folder.glob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if name in line.get("values", ()) and line["step"] > after:
                line["values"][name] = math.nan
        path.write_text("".join(map(as_text, lines)))
