"""The report's four plots, each a pure function from records to SVG.

A method has a line, and markers of a shape of its own; page.css gives the colours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from collectives.cost import Link

from ...units import about_bandwidth_text, bandwidth_text, bytes_text, seconds_text
from ..charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Point,
    band,
    clipped,
    drawing,
    frame,
    horizontal,
    line,
    text,
    vertical,
)
from .verdicts import (
    LATENCY_SECONDS,
    PART_NAMES,
    PARTS,
    Part,
    Record,
    mean_curve,
    modelled_step_seconds,
    pays_below,
    shared_compute_seconds,
)

MARKS = {  # 10 units wide around 0,0
    "dense": "M-4-4H4V4H-4Z",
    "topk": "M0-5.5L5 4H-5Z",
    "gtopk": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0Z",
    "gtopk-equal-bytes": "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
}


def mark(method: str, at: Point) -> str:
    """Draw a method's marker, a shape of its own."""
    return (
        f'<path class="mark" transform="translate({at[0]:.1f} {at[1]:.1f})" d="{MARKS[method]}"/>'
    )


def series(method: str, points: Sequence[Point], marked: Iterable[Point], below: str = "") -> str:
    """Draw a method's line and markers, on top of `below` (its band)."""
    marks = "".join(mark(method, point) for point in marked)
    return f'<g class="{method}">{below}{line(points)}{marks}</g>'


def key(method: str) -> str:
    """Draw a method's line and marker as small as a word, for a legend."""
    return (
        f'<svg class="key {method}" viewBox="0 0 34 14" aria-hidden="true">'
        f"{line([(1, 7), (33, 7)])}{mark(method, (17, 7))}</svg>"
    )


SLOWEST_LINK, FASTEST_LINK = 1e7, 1e11  # bits per second, the modelled range
BAR_ROW, BAR_HEIGHT = 92, 18  # units of the drawing


def accuracy_over_epochs(records: Sequence[Record]) -> str:
    """Draw mean test accuracy after each epoch, and a band from the worst to the best seed."""
    epochs = records[0]["epochs"]
    x, y = horizontal(1, epochs), accuracy_axis(records)
    lines = []
    for index, record in enumerate(records):
        by_epoch = list(zip(*record["accuracy_by_epoch"], strict=True))
        places = [x.place(epoch) for epoch in range(1, epochs + 1)]
        mean, worst, best = (
            list(zip(places, (y.place(summary(seeds)) for seeds in by_epoch), strict=True))
            for summary in (statistics.fmean, min, max)
        )
        lines.append(series(record["method"], mean, spaced(mean, index), band(worst, best)))
    x_ticks = {epoch: f"{epoch:.0f}" for epoch in x.ticks() if epoch == int(epoch)}
    axes = frame(x, y, x_ticks, percent_ticks(y), ("epoch", "test accuracy"))
    return drawing("Test accuracy over epochs, one line per method", [axes, clipped(lines)])


def loss_over_seconds(records: Sequence[Record], all_records: Sequence[Record]) -> str:
    """Draw mean training loss over seconds of training; one axis of losses for all records."""
    every = [loss for record in all_records for _, loss in mean_curve(record)]
    y = vertical(min(every) / 1.1, max(every) * 1.1, logarithmic=True)
    x = horizontal(0.0, max(mean_curve(record)[-1][0] for record in records))
    lines = []
    for record in records:
        curve = [(x.place(seconds), y.place(loss)) for seconds, loss in mean_curve(record)]
        marked = [curve[-1]]  # and others, so far apart that those of a short line are, too
        for point in reversed(curve):
            if marked[-1][0] - point[0] >= (RIGHT - LEFT) / 12:
                marked.append(point)
        lines.append(series(record["method"], curve, marked))
    x_ticks = {value: seconds_text(value) if value else "0" for value in x.ticks()}
    axes = frame(x, y, x_ticks, {loss: f"{loss:g}" for loss in y.ticks()}, ("", "training loss"))
    over = f"over an emulated link of {records[0]['link']}" if records[0]["link"] else "as it is"
    return drawing(f"Training loss over seconds, {over}", [axes, clipped(lines)])


def accuracy_over_bytes(records: Sequence[Record]) -> str:
    """Draw mean test accuracy over the bytes a rank has sent so far, on a logarithmic axis."""
    curves = {record["method"]: sent_and_accuracy(record) for record in records}
    y = accuracy_axis(records)
    seen = [sent for curve in curves.values() for sent, accuracy in curve if accuracy >= y.low]
    x = horizontal(min(seen) / 1.5, max(seen), logarithmic=True)
    lines = []
    for index, (method, curve) in enumerate(curves.items()):
        points = [(x.place(bytes_sent), y.place(accuracy)) for bytes_sent, accuracy in curve]
        lines.append(series(method, points, spaced(points, index)))
    x_ticks = {value: bytes_text(value) for value in x.ticks()}
    names = ("sent by each rank since the start", "test accuracy")
    axes = frame(x, y, x_ticks, percent_ticks(y), names)
    return drawing(
        "Test accuracy over bytes sent per rank, one line per method", [axes, clipped(lines)]
    )


def sent_and_accuracy(record: Record) -> list[tuple[float, float]]:
    """Return (bytes a rank has sent, mean accuracy) after each epoch."""
    steps_per_epoch = record["steps"] / record["epochs"]
    means = (statistics.fmean(seeds) for seeds in zip(*record["accuracy_by_epoch"], strict=True))
    return [
        (record["bytes_per_step"] * steps_per_epoch * epoch, mean)
        for epoch, mean in enumerate(means, start=1)
    ]


def accuracy_axis(records: Sequence[Record]) -> Axis:
    """Return the y axis of accuracies."""
    return vertical(accuracy_floor(records), 1.0)


def accuracy_floor(records: Sequence[Record]) -> float:
    """Return where the accuracy axis starts: 5 to 10 points below the worst final accuracy.

    The first epochs' climb is cut off, so that the end, where methods differ, can be read.
    """
    worst = min(seed[-1] for record in records for seed in record["accuracy_by_epoch"])
    return max(0.0, (math.floor(20 * worst) - 1) / 20)


def percent_ticks(axis: Axis) -> dict[float, str]:
    return {value: f"{100 * value:.0f} %" for value in axis.ticks()}


def spaced(points: Sequence[tuple[float, float]], index: int) -> list[tuple[float, float]]:
    """Return a few points to mark, shifted by method so that markers do not hide each other."""
    stride = max(1, len(points) // 6)
    return [*points[index * stride // 4 :: stride], points[-1]]


def step_time_by_part(records: Sequence[Record]) -> str:
    """Draw one bar per method, stacked: compute, select, communicate."""
    totals = [sum(record["step_seconds"][part] for part in PARTS) for record in records]
    scale = WIDTH / max(totals)
    rows = []
    for row, (record, total) in enumerate(zip(records, totals, strict=True)):
        top, left = row * BAR_ROW, 0.0
        rows.append(text((0, top + 14), record["label"], "label"))
        rows.append(text((WIDTH, top + 14), seconds_text(total), "label end"))
        for place, part in enumerate(PARTS):
            seconds = record["step_seconds"][part]
            width = seconds * scale
            rows.append(
                f'<rect class="{part}" x="{left:.1f}" y="{top + 21}" width="{width:.1f}" '
                f'height="{BAR_HEIGHT}"/>'
            )
            left += width
            if seconds:
                column = place * WIDTH / len(PARTS)
                rows.append(text((column, top + 56), PART_NAMES[part], "tick"))
                rows.append(text((column, top + 74), seconds_text(seconds), "tick"))
    title = "Measured time of a step, one bar per method, split by part"
    return drawing(title, [HATCHES, *rows], height=len(records) * BAR_ROW)


HATCHES = (  # drawn over the colour, so that parts differ without it too
    '<defs><pattern id="select-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="ground" width="6" height="6"/>'
    '<rect class="stripe" width="2" height="6"/></pattern>'
    '<pattern id="communicate-hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect class="ground" width="6" height="6"/><circle class="stripe" cx="3" cy="3" r="1.4"/>'
    "</pattern></defs>"
)


def part_key(part: Part) -> str:
    """Draw a swatch of a part of the step, for the legend; needs `HATCHES` in the page."""
    return (
        '<svg class="key" viewBox="0 0 34 14" aria-hidden="true">'
        f'<rect class="{part}" width="34" height="14"/></svg>'
    )


def modelled_time_over_bandwidth(records: Sequence[Record]) -> str:
    """Draw the modelled step time of each method over bandwidth, and gTop-k's break-even."""
    dense, _, gtopk, _ = records
    compute = shared_compute_seconds(records)
    decades = math.log10(FASTEST_LINK / SLOWEST_LINK)
    bandwidths = [SLOWEST_LINK * 10 ** (decades * i / 48) for i in range(49)]
    curves = {
        record["method"]: [
            modelled_step_seconds(record, compute, Link.of(bandwidth, LATENCY_SECONDS))
            for bandwidth in bandwidths
        ]
        for record in records
    }
    modelled = [seconds for curve in curves.values() for seconds in curve]
    x = horizontal(SLOWEST_LINK, FASTEST_LINK, logarithmic=True)
    y = vertical(min(modelled) / 1.2, max(modelled) * 1.2, logarithmic=True)
    lines = []
    for index, (method, curve) in enumerate(curves.items()):
        points = [
            (x.place(bandwidth), y.place(seconds))
            for bandwidth, seconds in zip(bandwidths, curve, strict=True)
        ]
        lines.append(series(method, points, spaced(points, index)))
    x_ticks = {value: bandwidth_text(value).removesuffix("bit/s") for value in x.ticks()}
    y_ticks = {value: seconds_text(value) for value in y.ticks()}
    names = ("bandwidth of the link, bit/s", "step time in the model")
    marker = break_even_marker(x, pays_below(dense, gtopk))
    title = "Modelled step time over link bandwidth, one line per method"
    return drawing(title, [frame(x, y, x_ticks, y_ticks, names), *lines, marker])


def break_even_marker(x: Axis, bandwidth: float | None) -> str:
    """Draw a labelled line where dense and gTop-k part; nothing outside the plot."""
    if bandwidth is None or not x.low <= bandwidth <= x.high:
        return ""
    at = x.place(bandwidth)
    side, anchor = (-7, "end") if at > (LEFT + RIGHT) / 2 else (7, "start")
    return (
        f'<path class="break-even" d="M{at:.1f} {TOP}V{BOTTOM}"/>'
        + text((at + side, TOP + 14), "break-even in the model", f"label {anchor}")
        + text((at + side, TOP + 31), about_bandwidth_text(bandwidth), f"label {anchor}")
    )
