"""`gtopk top`: a table of each rank's state in a recorded run, with colours on a terminal."""

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
from .arguments import Command, fail, in_json, number_in
from .charts import aligned

RECENT: Final = 50  # steps of which figures are means
SILENT_SECONDS: Final = 10.0

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@dataclasses.dataclass(frozen=True)
class Status:
    """A rank's current state; figures are means of its last steps, None without any.

    They count single steps of the rank's optimizer, also where several are recorded as one. Steps
    before the run last resumed are left out: they may have been on other machines.

    state:      "running", "silent" (for how long: silent_seconds), or how it ended.
    failed:     whether it ended out of order.
    sent_bytes: bytes sent in a step.
    density:    the share of the values that it sends.
    straggler_score: how fast it computes beside the fastest rank, 1.
    link:       the emulated link, as text; "": the real links.
    values:     the values that its script logged last; None for one that was not finite.
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
    """Return the most seconds to expect between two lines, also if only some steps are written."""
    steps = [step.report.compute_seconds + step.report.synchronize_seconds for step in recent]
    if len(recent) == 1:
        # Earlier versions did not write `every`.
        return steps[0] * int(rank.begin.get("every", 1))
    pauses = [later.seconds - step.seconds for step, later in itertools.pairwise(recent)]
    return max([*steps, *pauses], default=0.0)


def _status(rank: RankRecord, silent_seconds: float) -> Status:
    # The last attempt only: the time between two would count as that of a step.
    recent = rank.steps[rank.earlier :][-RECENT:]
    last = recent[-1].report if recent else None
    # The first one has measured the links, too.
    reports = [step.report for step in recent[1:] or recent]
    # Skipped steps have no local ones: where all were skipped, they count as recorded.
    own = sum(report.local_steps for report in reports) or len(reports)
    means = None
    if reports:
        found = [parts(report) for report in reports]
        means = {part: sum(each[part] for each in found) / own for part in PARTS}
    seconds = recent[-1].seconds - recent[0].seconds if len(recent) > 1 else 0.0
    values: dict[str, float | None] = {}
    for note in rank.values:
        # Each name's last value: a script may log some of them less often.
        values |= note.content
    # Twice its longest pause: a rank whose steps take a minute is not silent after ten seconds.
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
        sent_bytes=sum(each.sent_bytes for each in reports) / own if reports else None,
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
# Columns to leave out, in this order, where a line is too long.
_DISPENSABLE = (
    *("residual", "density", "exchange", "host", "batch"),
    *("sent/step", "score", "wait", "steps/s"),
)
_LAST = ("compute", "step takes")  # left out after the script's values


def rows(statuses: Sequence[Status], width: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row for each rank, in lines of at most `width` if possible.

    Empty columns are left out; the last one, the state, may be longer than its line.
    """
    names = accuracy_and_loss_first({name for status in statuses for name in status.values})[:2]
    ours = [*_HEADINGS, *_MORE]
    headings = [*ours, *names, "state"]
    if any(status.link for status in statuses):
        headings[ours.index("step takes")] = "emulated step takes"
    logged = range(len(ours), len(ours) + len(names))
    cells = [_row(status, names) for status in statuses]
    kept = [place for place in range(len(headings)) if any(row[place] != "-" for row in cells)]
    for dispensable in (*map(ours.index, _DISPENSABLE), *reversed(logged), *map(ours.index, _LAST)):
        lengths = [max(len(row[place]) for row in [headings, *cells]) for place in kept[:-1]]
        # The state may be longer than its line, but its usual word has to fit.
        if width is None or sum(lengths) + 2 * len(lengths) + len("running") <= width:
            break
        kept = [place for place in kept if place != dispensable]
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
    """Return headings, and a line for each rank; width: of the terminal, as for `rows`."""
    headings, cells = rows(statuses, width)
    head, *lines = aligned([headings, *cells], left=len(headings))
    if in_colour:
        for place, (status, line) in enumerate(zip(statuses, lines, strict=True)):
            code = {"running": "32", "silent": "1;31"}.get(
                status.state, "1;31" if status.failed else "2"
            )
            begin = len(line) - len(cells[place][-1])  # of the state
            lines[place] = line[:begin] + coloured(line[begin:], code)
    return [head, *lines]


def parser() -> Command:
    """Return the command line's grammar."""
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
    """Show the run and return the exit code: 1 where there is none."""
    options = parser().parse_args(arguments)
    # A dumb terminal cannot draw over a line.
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
        return fail("top", "ended by Ctrl-C; the run itself goes on", code=0)


def _snapshots(folder: Path, every: float, waits: bool = False) -> Iterator[list[Status]]:
    """Yield the ranks' states, again and again until the run is over.

    waits: until a run has begun to write its record in the folder.
    Prints on stderr which ranks' records are missing, whenever that changes; raises ValueError
    where no run can be read.
    """
    lacked: list[tuple[str, str]] = []
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
        # Told when it changes: a line a second would scroll the table away.
        lacks = [each for each in (run.lacks(), run.unread()) if each is not None]
        for each in lacks:
            if each not in lacked:
                print(f"gtopk top: {': '.join(each)}", file=sys.stderr)
        lacked = lacks
        yield statuses
        if all(rank.end is not None for rank in run.ranks):
            return
        time.sleep(every)


def _print(snapshots: Iterable[list[Status]], as_json: bool) -> None:
    for statuses in snapshots:
        if as_json:
            looked = in_json({"unix_seconds": time.time(), "ranks": statuses})
            print(json.dumps(looked), flush=True)
        else:
            print("\n".join(as_lines(statuses)))


def _refresh(snapshots: Iterable[list[Status]], folder: Path) -> None:
    """Draw each table over the last one; ranks for which the screen has no room are counted."""
    title, in_colour = shown(f"{folder}"), wants_colour(sys.stdout)
    height = 0
    print(_HIDE_CURSOR, end="")
    try:
        for statuses in snapshots:
            width, room = shutil.get_terminal_size()
            over = f"\x1b[{height}A\x1b[J" if height else ""
            plain = [title, *as_lines(statuses, width)]
            # The terminal breaks a line whose state is longer than the rest of it.
            ends = [*itertools.accumulate(-(-len(line) // width) or 1 for line in plain)]
            # The cursor goes no higher than the screen's first line, and the last two are ours.
            fits = sum(end <= room - 2 for end in ends) or 1
            lines, height = [title, *as_lines(statuses, width, in_colour)][:fits], ends[fits - 1]
            if fits < len(ends):
                lines.append(f"and {count_text(len(ends) - fits)} more: enlarge the window")
                height += 1
            print(over + "\n".join(lines), flush=True)
    finally:
        print(_SHOW_CURSOR, end="", flush=True)
