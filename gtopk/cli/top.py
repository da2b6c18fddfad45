"""`gtopk top`: show each rank's state in a recorded run as a table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..runtime.standard_streams import coloured, wants_colour
from ..telemetry.lines import path_of, shown
from ..telemetry.reading import NoRunError, RankRecord, Reader, Run, Step, accuracy_and_loss_first
from ..telemetry.step_report import PARTS, batch, density, parts
from ..units import bytes_text, count_text, digits, duration_text, seconds_text
from .arguments import Command, fail, json_value, number_in
from .charts import aligned

RECENT: Final = 50  # average over this many last steps
SILENT_SECONDS: Final = 10.0

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@dataclasses.dataclass(frozen=True)
class Status:
    """A rank's current state; figures are means over its last RECENT steps, None without steps.

    They are per optimizer step, even if several are recorded as one. Steps before the run was last
    resumed are left out, as they may have run on other machines.

    state:      "running", "silent" (for silent_seconds), or how it ended.
    failed:     whether it ended abnormally.
    sent_bytes: bytes sent per step.
    density:    the fraction of the values that it sends.
    straggler_score: its computing speed relative to the fastest rank, which has 1.
    link:       the emulated link, as text; "": the real links.
    values:     the last values that its script logged; None for a value that was not finite.
    """

    rank: int
    host: str
    state: str
    failed: bool
    silent_seconds: float
    step: int | None
    steps_per_second: float | None
    step_seconds: dict[str, float] | None
    sent_bytes: float | None
    density: float | None
    samples: int | None
    straggler_score: float | None
    residual_norm: float | None
    skipped: int
    values: dict[str, float | None]
    link: str = ""


def status_of(run: Run, folder: Path, now: Callable[[], float] = time.time) -> list[Status]:
    written = [path_of(folder, rank.rank).stat().st_mtime for rank in run.ranks]
    return [
        _status(rank, max(0.0, now() - seconds))
        for rank, seconds in zip(run.ranks, written, strict=True)
    ]


def _longest_pause(rank: RankRecord, recent: Sequence[Step]) -> float:
    """Return the longest expected seconds between two lines, even if not every step is written."""
    steps = [step.report.compute_seconds + step.report.synchronize_seconds for step in recent]
    if len(recent) == 1:
        # `every` is missing in records of earlier versions.
        return steps[0] * int(rank.begin.get("every", 1))
    pauses = [later.seconds - step.seconds for step, later in itertools.pairwise(recent)]
    return max([*steps, *pauses], default=0.0)


def _status(rank: RankRecord, silent_seconds: float) -> Status:
    # Use only the last attempt: the pause between two attempts would count as a step's time.
    recent = rank.steps[rank.earlier :][-RECENT:]
    last = recent[-1].report if recent else None
    # Drop the first step, which also measured the links.
    reports = [step.report for step in recent[1:] or recent]
    # Skipped steps report 0 local steps; if all were skipped, count the recorded ones.
    own_steps = sum(report.local_steps for report in reports) or len(reports)
    means = None
    if reports:
        found = [parts(report) for report in reports]
        means = {part: sum(each[part] for each in found) / own_steps for part in PARTS}
    seconds = recent[-1].seconds - recent[0].seconds if len(recent) > 1 else 0.0
    values: dict[str, float | None] = {}
    for note in rank.values:
        # Keep the last value of each name, as a script may log some less often.
        values |= note.content
    # Allow twice its longest pause: steps may take longer than SILENT_SECONDS.
    silent_after_seconds = max(SILENT_SECONDS, 2 * _longest_pause(rank, recent))
    state = "silent" if silent_seconds > silent_after_seconds else "running"
    return Status(
        rank=rank.rank,
        host=rank.begin["host"],
        state=rank.end if rank.end is not None else state,
        failed=rank.end is not None and not rank.in_order,
        silent_seconds=round(silent_seconds, 1),
        step=last.step if last else None,
        steps_per_second=(recent[-1].report.step - recent[0].report.step) / seconds
        if seconds
        else None,
        step_seconds=means,
        sent_bytes=sum(each.sent_bytes for each in reports) / own_steps if reports else None,
        density=next((share for each in reversed(reports) if (share := density(each))), None),
        samples=next((round(size) for each in reversed(reports) if (size := batch(each))), None),
        straggler_score=rank.scores[-1].content["score"] if rank.scores else None,
        residual_norm=rank.residuals[-1].content["norm"] if rank.residuals else None,
        skipped=sum(step.report.skipped for step in rank.steps),
        values=values,
        link=rank.begin.get("link", ""),
    )


_HEADINGS = ("rank", "host", "step", "steps/s", "step takes", "compute", "wait", "exchange")
_MORE = ("score", "sent/step", "density", "batch", "residual")
# Columns to drop, in this order, if lines are too long.
_DISPENSABLE = (
    *("residual", "density", "exchange", "host", "batch"),
    *("sent/step", "score", "wait", "steps/s"),
)
_LAST = ("compute", "step takes")  # dropped after the script's values


def rows(statuses: Sequence[Status], width: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Return the headings and a row per rank, so that lines fit `width` if possible.

    Empty columns are dropped; the last one, the state, may exceed the width.
    """
    names = accuracy_and_loss_first({name for status in statuses for name in status.values})[:2]
    columns = [*_HEADINGS, *_MORE]
    headings = [*columns, *names, "state"]
    if any(status.link for status in statuses):
        headings[columns.index("step takes")] = "emulated step takes"
    logged = range(len(columns), len(columns) + len(names))
    cells = [_row(status, names) for status in statuses]
    kept = [place for place in range(len(headings)) if any(row[place] != "-" for row in cells)]
    dispensable = [columns.index(name) for name in _DISPENSABLE]
    last_dispensable = [columns.index(name) for name in _LAST]
    for column in (*dispensable, *reversed(logged), *last_dispensable):
        lengths = [max(len(row[place]) for row in [headings, *cells]) for place in kept[:-1]]
        # The state may exceed the width, but its usual word must fit.
        if width is None or sum(lengths) + 2 * len(lengths) + len("running") <= width:
            break
        kept = [place for place in kept if place != column]
    return [headings[place] for place in kept], [[row[place] for place in kept] for row in cells]


def _row(status: Status, names: Sequence[str]) -> list[str]:
    seconds = status.step_seconds
    total = sum(seconds.values()) if seconds else 0.0

    def share(part: str) -> str:
        return f"{100 * seconds[part] / total:.0f} %" if seconds and total else "-"

    state = status.state
    if state == "silent":
        state = f"silent for {duration_text(status.silent_seconds)}"
    elif state != "running" and not status.failed:
        state = "ended"
    if status.skipped:
        state += f", {status.skipped} skipped"
    return [
        str(status.rank),
        status.host,
        "-" if status.step is None else count_text(status.step),
        "-" if status.steps_per_second is None else digits(status.steps_per_second),
        seconds_text(total) if total else "-",
        share("compute"),
        share("wait"),
        share("exchange") if seconds and seconds["exchange"] else "-",
        "-" if status.straggler_score is None else f"{status.straggler_score:.2g}",
        "-" if not status.sent_bytes else bytes_text(status.sent_bytes),
        "-" if status.density is None else f"{status.density:.2g}",
        "-" if status.samples is None else count_text(status.samples),
        "-" if status.residual_norm is None else f"{status.residual_norm:.3g}",
        *(_number(status.values[name]) if name in status.values else "-" for name in names),
        state,
    ]


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"


def as_lines(
    statuses: Sequence[Status], width: int | None = None, in_colour: bool = False
) -> list[str]:
    """Return the headings and a line per rank; width: of the terminal, as for `rows`."""
    headings, cells = rows(statuses, width)
    head, *lines = aligned([headings, *cells], left=len(headings))
    if in_colour:
        for place, (status, line) in enumerate(zip(statuses, lines, strict=True)):
            code = {"running": "32", "silent": "1;31"}.get(
                status.state, "1;31" if status.failed else "2"
            )
            begin = len(line) - len(cells[place][-1])  # where the state begins
            lines[place] = line[:begin] + coloured(line[begin:], code)
    return [head, *lines]


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk top",
        "Show what each rank of a run is doing, from the record that it writes. On a "
        "terminal it waits for a run to begin, and refreshes until Ctrl-C or the end of the run.",
        "gtopk top runs/first\n  gtopk top runs/first --once --json",
    )
    described.add_argument("run", type=Path, metavar="RUN", help="folder with the record")
    described.flag("--once", "show once and exit")
    every = "seconds between refreshes"
    described.option("--every", number_in("(0, 86400]"), 1.0, every, metavar="SECONDS")
    described.flag("--json", "print one JSON object per refresh")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the run and return the exit code, 1 if there is no run."""
    options = parser().parse_args(arguments)
    # A dumb terminal cannot overwrite lines.
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    try:
        once = options.once or not (options.json or live)
        snapshots: Iterator[list[Status]] = _snapshots(options.run, options.every, waits=not once)
        if once:
            snapshots = itertools.islice(snapshots, 1)
        if options.json or once:
            _print(snapshots, options.json)
        else:
            _refresh(snapshots, options.run)
        return 0
    except ValueError as error:
        return fail("top", error)
    except KeyboardInterrupt:
        return fail("top", "stopped by Ctrl-C; the run continues", code=0)


def _snapshots(folder: Path, every: float, waits: bool = False) -> Iterator[list[Status]]:
    """Yield the ranks' states repeatedly until the run is over.

    waits: first wait until a run starts to write its record in the folder.
    Prints to stderr which ranks' records are missing, whenever that changes. Raises ValueError if
    no run can be read.
    """
    reported: list[tuple[str, str]] = []
    reader, began, waited = Reader(folder, RECENT), False, False
    while True:
        try:
            run = reader.read()
            statuses = status_of(run, folder)
        except OSError as error:
            raise ValueError(str(error)) from error
        except NoRunError:
            if began or not waits:
                raise
            if not waited:
                print(f"gtopk top: waiting for a run to begin in '{folder}'", file=sys.stderr)
            waited = True
            time.sleep(every)
            continue
        began = True
        # Print only changes: a line per second would scroll the table away.
        missing = [each for each in (run.missing_text(), run.skipped_text()) if each is not None]
        for each in missing:
            if each not in reported:
                print(f"gtopk top: {': '.join(each)}", file=sys.stderr)
        reported = missing
        yield statuses
        if all(rank.end is not None for rank in run.ranks):
            return
        time.sleep(every)


def _print(snapshots: Iterable[list[Status]], as_json: bool) -> None:
    for statuses in snapshots:
        if as_json:
            snapshot = json_value({"unix_seconds": time.time(), "ranks": statuses})
            print(json.dumps(snapshot), flush=True)
        else:
            print("\n".join(as_lines(statuses)))


def _refresh(snapshots: Iterable[list[Status]], folder: Path) -> None:
    """Draw each table over the last one; if ranks do not fit the screen, show their number."""
    title, in_colour = shown(f"{folder}"), wants_colour(sys.stdout)
    height = 0
    print(_HIDE_CURSOR, end="")
    try:
        for statuses in snapshots:
            width, room = shutil.get_terminal_size()
            over = f"\x1b[{height}A\x1b[J" if height else ""
            plain = [title, *as_lines(statuses, width)]
            # The terminal wraps a line if its state is too long.
            ends = [*itertools.accumulate(-(-len(line) // width) or 1 for line in plain)]
            # The cursor cannot move above the screen's first line; the last two lines are reserved.
            fits = sum(end <= room - 2 for end in ends) or 1
            lines, height = [title, *as_lines(statuses, width, in_colour)][:fits], ends[fits - 1]
            if fits < len(ends):
                lines.append(f"and {count_text(len(ends) - fits)} more: enlarge the window")
                height += 1
            print(over + "\n".join(lines), flush=True)
    finally:
        print(_SHOW_CURSOR, end="", flush=True)
