"""Statuses as a table: words for whoever reads them, and colours on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...telemetry.reading import by_interest
from ...units import bytes_text, count_text, digits, seconds_text
from .status import Status

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = ("rank", "host", "step", "steps/s", "step takes", "compute", "wait", "exchange")
_MORE = ("score", "sent/step", "density", "batch", "residual")
# What is left out first where a line is too long.
_DISPENSABLE = (
    *("residual", "density", "exchange", "host", "batch"),
    *("sent/step", "score", "wait", "steps/s"),
)
_LAST = ("compute", "step takes")  # after what the script has logged


def rows(statuses: Sequence[Status], width: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row for each rank, in lines of at most `width` where that can be.

    Columns that say nothing are left out; the last, the state, may be longer than its line.
    """
    names = by_interest({name for status in statuses for name in status.values})[:2]
    ours = [*_HEADINGS, *_MORE]
    headings = [*ours, *names, "state"]
    if any(status.link for status in statuses):
        headings[ours.index("step takes")] = "emulated step takes"
    logged = range(len(ours), len(ours) + len(names))
    cells = [_row(status, names) for status in statuses]
    kept = [place for place in range(len(headings)) if any(row[place] != "-" for row in cells)]
    for dispensable in (
        *map(ours.index, _DISPENSABLE),
        *reversed(logged),
        *map(ours.index, _LAST),
    ):
        lengths = [max(len(row[place]) for row in [headings, *cells]) for place in kept[:-1]]
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
        state = f"silent for {seconds_text(status.silent_seconds)}"
    elif state != "running" and not status.failed:
        state = "ended"
    if status.skipped:
        state += f", {status.skipped} skipped"
    cells = [
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
    return [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in cells]


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"


def as_lines(statuses: Sequence[Status]) -> list[str]:
    """Return the table as lines."""
    headings, cells = rows(statuses)
    table = [headings, *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def as_table(statuses: Sequence[Status], title: str, width: int | None = None) -> Table:
    """Return the table for rich, on a terminal of this width."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    headings, cells = rows(statuses, width)
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        right = heading not in ("host", "state")
        table.add_column(escape(heading), justify="right" if right else "left", no_wrap=right)
    for status, row in zip(statuses, cells, strict=True):
        usual = "red" if status.failed else "dim"
        style = {"running": "green", "silent": "bold red"}.get(status.state, usual)
        table.add_row(*map(escape, row[:-1]), Text(row[-1], style=style))
    return table
