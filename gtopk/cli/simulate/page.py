"""A page with plots of simulated runs: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from ...units import digits
from ..charts.page import page as shared_page
from ..charts.svg import Axis, drawing, frame, horizontal, line, text, vertical
from .record import Record

TITLE = "Adaptive batches, simulated"


def page(records: Sequence[Record], lines: Sequence[str]) -> str:
    """Return the page: the text of the comparison, and plots of its first seed."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    first = [record for record in records if record.seed == records[0].seed]
    sizes = "".join(
        f"<figure><h3>Samples of each rank and step: {escape(record.mode)}</h3>"
        f"{sizes_over_time(record)}</figure>"
        for record in first
        if record.mode in ("balanced", "abs", "adaptive-sgd")
    )
    return shared_page(
        TITLE,
        style,
        f"""<h1>{TITLE}</h1>
<figure><pre>{escape(chr(10).join(lines))}</pre></figure>
<h2>Plots</h2>
<div class="plots">
<figure><h3>Test accuracy over simulated seconds</h3>{accuracy_over_time(first)}</figure>
<figure><h3>Share of the simulated time that ranks compute</h3>{utilisation(first)}</figure>
{sizes}
</div>""",
    )


def accuracy_over_time(records: Sequence[Record]) -> str:
    """Draw one line per mode."""
    reached = [accuracy for record in records for _, accuracy in record.accuracy]
    x = horizontal(0.0, max(record.seconds for record in records))
    y = vertical(min(reached), 1.0)
    lines = [
        series(place, record.mode, [(x.place(s), y.place(a)) for s, a in record.accuracy])
        for place, record in enumerate(records)
    ]
    ticks = {value: f"{100 * value:.0f} %" for value in y.ticks()}
    axes = frame(x, y, seconds_ticks(x), ticks, ("simulated seconds", "test accuracy"))
    return drawing("Test accuracy over simulated seconds, one line per mode", [axes, *lines])


def sizes_over_time(record: Record) -> str:
    """Draw one line per rank."""
    x = horizontal(0.0, record.seconds)
    y = vertical(0.0, max(max(sizes) for _, sizes in record.sizes))
    lines = [
        series(
            rank,
            f"rank {rank}",
            [(x.place(s), y.place(sizes[rank])) for s, sizes in record.sizes],
        )
        for rank in range(len(record.busy))
    ]
    ticks = {value: digits(value) for value in y.ticks()}
    axes = frame(x, y, seconds_ticks(x), ticks, ("simulated seconds", "samples"))
    return drawing(f"Samples of each rank over simulated seconds, {record.mode}", [axes, *lines])


def utilisation(records: Sequence[Record]) -> str:
    """Draw a bar for each rank of each mode."""
    rows, top = [], 0
    for record in records:
        rows.append(text((0, top + 14), record.mode, "label"))
        for rank, busy in enumerate(record.busy):
            width = 370 * busy / record.seconds
            below = top + 22 + 14 * rank
            rows.append(
                f'<rect class="bar series-{rank % 6}" x="0" y="{below}" width="{width:.1f}" '
                'height="11"/>'
            )
            share = f"rank {rank}: {100 * busy / record.seconds:.0f} %"
            rows.append(text((width + 6, below + 9), share, "tick"))
        top += 36 + 14 * len(record.busy)
    return drawing("Share of time computing, of each rank and mode", rows, height=top)


def series(place: int, name: str, points: Sequence[tuple[float, float]]) -> str:
    """Draw a line with its name at its end."""
    x, y = points[-1]
    label = text((x - 4, y - 5), name, "label end")
    return f'<g class="series-{place % 6}">{line(points)}{label}</g>'


def seconds_ticks(axis: Axis) -> dict[float, str]:
    """Return the ticks of an axis of seconds."""
    return {value: f"{value:g}" for value in axis.ticks()}
