"""`gtopk report`: its options, and the page and JSON that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...telemetry.reading import RankRecord, Run, read_run
from ..arguments import Command, fail
from . import series
from .series import happenings, tiles, verdict, what_was_run


def parser() -> Command:
    """Return the command line's grammar."""
    described = Command(
        "report",
        "Draw a run as one self-contained HTML page, from the record that its ranks "
        "wrote. Works during the run, too.",
        "GTOPK_RUN=runs/first gtopk run -n 4 train.py\n  gtopk report runs/first --out first.html",
    )
    described.add_argument("run", type=Path, metavar="RUN", help="folder with the record")
    out = "page to write; default: report.html in RUN"
    described.option("--out", Path, None, out, metavar="FILE")
    described.flag("--json", "print the figures as JSON, and write no page")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, say where it is, and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        run = read_run(options.run)
    except (OSError, ValueError) as error:
        return fail("report", error)
    for amiss in (run.lacks(), run.unread()):
        if amiss is not None:
            print(f"gtopk report: {': '.join(amiss)}", file=sys.stderr)
    if options.json:
        print(json.dumps(as_record(run), indent=1))
        return 0
    if not any(rank.steps for rank in run.ranks):
        return fail("report", f"the run in '{options.run}' has no steps yet: nothing can be drawn")
    from .page import page

    out = options.out or options.run / "report.html"
    try:
        out.write_text(page(run, options.run.resolve().name), encoding="utf-8")
    except OSError as error:
        return fail("report", f"--out {out} cannot be written: {error.strerror}")
    print(out)
    return 0


def as_record(run: Run) -> dict[str, Any]:
    """Return the page's content in the types of JSON."""
    over = series.axes(run)["steps"]
    return {
        "run": what_was_run(run),
        "began_unix_seconds": run.began_unix_seconds,
        "seconds": run.seconds,
        "figures": {tile.name: [tile.value, tile.detail] for tile in tiles(run)},
        "verdict": verdict(run),
        "happened": happenings(run),
        "logged": {
            name: [point[:2] for point in series.logged(run, name, over)]
            for name in series.value_names(run)
        },
        "ranks": [_of_rank(rank) for rank in run.ranks],
    }


def _of_rank(rank: RankRecord) -> dict[str, Any]:
    last = rank.steps[-1] if rank.steps else None
    seconds = series.mean_parts(series.settled(rank)) if rank.steps else None
    residual = rank.residuals[-1].content if rank.residuals else {}
    return {
        "rank": rank.rank,
        "host": rank.begin["host"],
        "steps": rank.taken,
        "covers": last.report.covers if last else None,
        "samples": last.samples_so_far if last else 0,
        "sent_bytes": last.bytes_so_far if last else 0,
        "step_seconds": seconds,
        "utilisation": series.utilisation(seconds) if seconds else 0.0,
        "straggler_score": rank.scores[-1].content["score"] if rank.scores else None,
        "residual_norm": residual.get("norm"),
        "residual_age_steps": residual.get("age_steps"),
        "end": rank.end,
    }
