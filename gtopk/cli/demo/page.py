"""The demo's report: figures and plots with how to read them, as a page that needs no other file.

A method has a line, and markers of a shape of its own; page.css gives the colours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...units import bytes_text, count_text, digits, points_text, seconds_text
from ..charts import (
    LEFT,
    RIGHT,
    WIDTH,
    Axis,
    Point,
    band,
    clipped,
    drawing,
    figure,
    frame,
    hatches,
    horizontal,
    legend,
    line,
    plots,
    prose,
    swatch,
    text,
    tile,
    vertical,
)
from ..charts import facts as list_of_facts
from ..charts import page as shared_page
from .verdicts import (
    METHODS,
    PARTS,
    Record,
    accuracy_verdict,
    checked,
    epochs_text,
    fraction,
    level,
    link_verdict,
    mean_curve,
    over_link,
    time_outcome,
)

TITLE = "gTop-k beside dense: what the demo measured"
DATASETS = {"digits": "scikit-learn's 8x8 handwritten digits"}
PART_NAMES = {"compute": "compute", "select": "select + copy", "communicate": "communicate"}
MARKS = {  # 10 units wide around 0,0
    "dense": "M-4-4H4V4H-4Z",
    "topk": "M0-5.5L5 4H-5Z",
    "gtopk": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0Z",
    "gtopk-equal-bytes": "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
}
BAR_ROW, BAR_HEIGHT = 92, 18  # units of the drawing


def mark(method: str, at: Point) -> str:
    """Draw a method's marker."""
    return (
        f'<path class="mark" transform="translate({at[0]:.1f} {at[1]:.1f})" d="{MARKS[method]}"/>'
    )


def series(method: str, points: Sequence[Point], marked: Iterable[Point], below: str = "") -> str:
    """Draw a method's line and markers, on top of `below` (its band)."""
    marks = "".join(mark(method, point) for point in marked)
    return f'<g class="{method}">{below}{line(points)}{marks}</g>'


def methods_legend(records: Sequence[Record]) -> str:
    """Return a legend with each method's line and marker."""
    return legend(
        (
            f'<svg class="key {record["method"]}" viewBox="0 0 34 14" aria-hidden="true">'
            f"{line([(1, 7), (33, 7)])}{mark(record['method'], (17, 7))}</svg>",
            record["label"],
        )
        for record in records
    )


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


def accuracy_over_bytes(records: Sequence[Record]) -> str:
    """Draw mean test accuracy over the bytes a rank has sent so far, on a logarithmic axis."""
    curves = {record["method"]: sent_and_accuracy(record) for record in records}
    y = accuracy_axis(records)
    # What lies below the accuracy axis, which is cut off, must not stretch this one.
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


def sent_and_accuracy(record: Record) -> list[Point]:
    """Return (bytes a rank has sent, mean accuracy) after each epoch."""
    steps_per_epoch = record["steps"] / record["epochs"]
    means = (statistics.fmean(seeds) for seeds in zip(*record["accuracy_by_epoch"], strict=True))
    return [
        (record["bytes_per_step"] * steps_per_epoch * epoch, mean)
        for epoch, mean in enumerate(means, start=1)
    ]


def loss_over_seconds(records: Sequence[Record], all_records: Sequence[Record]) -> str:
    """Draw mean training loss over seconds of training; one axis of losses for all records."""
    every = [loss for record in all_records for _, loss in mean_curve(record)]
    y = vertical(min(every) / 1.1, max(every) * 1.1, logarithmic=True)
    x = horizontal(0.0, max(mean_curve(record)[-1][0] for record in records))
    lines = []
    for record in records:
        curve = [(x.place(seconds), y.place(loss)) for seconds, loss in mean_curve(record)]
        # From the end on, so far apart that the markers of a short line do not touch either.
        marked = [curve[-1]]
        for point in reversed(curve):
            if marked[-1][0] - point[0] >= (RIGHT - LEFT) / 12:
                marked.append(point)
        lines.append(series(record["method"], curve, marked))
    x_ticks = {value: seconds_text(value) if value else "0" for value in x.ticks()}
    axes = frame(x, y, x_ticks, {loss: f"{loss:g}" for loss in y.ticks()}, ("", "training loss"))
    over = f"over an emulated link of {records[0]['link']}" if records[0]["link"] else "as it is"
    return drawing(f"Training loss over seconds, {over}", [axes, clipped(lines)])


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
                # In columns: words right below a narrow part would overlap.
                column = place * WIDTH / len(PARTS)
                rows.append(text((column, top + 56), PART_NAMES[part], "tick"))
                rows.append(text((column, top + 74), seconds_text(seconds), "tick"))
    title = "Measured time of a step, one bar per method, split by part"
    drawn = [hatches("select", "communicate"), *rows]
    return drawing(title, drawn, height=len(records) * BAR_ROW)


def accuracy_axis(records: Sequence[Record]) -> Axis:
    """Return the axis of accuracies, from 5 to 10 points below the worst final accuracy.

    The first epochs' climb is cut off, so that the end, where methods differ, can be read.
    """
    worst = min(seed[-1] for record in records for seed in record["accuracy_by_epoch"])
    return vertical(max(0.0, (math.floor(20 * worst) - 1) / 20), 1.0)


def percent_ticks(axis: Axis) -> dict[float, str]:
    return {value: f"{100 * value:.0f} %" for value in axis.ticks()}


def spaced(points: Sequence[Point], index: int) -> list[Point]:
    """Return a few points to mark, shifted by method so that markers do not hide each other."""
    stride = max(1, len(points) // 6)
    return [*points[index * stride // 4 :: stride], points[-1]]


def figures(records: Sequence[Record]) -> list[str]:
    """Return the figures of the machine as it is."""
    methods = methods_legend(records)
    floor = accuracy_axis(records).low
    cut = f" The accuracy axis starts at {100 * floor:.0f} %; the climb below is cut off."
    cut = cut if floor else ""
    seeds = (
        "A line is the mean over seeds, its band goes from the worst to the best seed. What makes "
        "a seed easy or hard is the same for all methods: bands that overlap may still differ "
        "seed by seed."
    )
    if records[0]["seeds"] == 1:
        seeds = "A line is the one seed that was run; another seed would draw another line."
    found = [
        figure(
            "Test accuracy over epochs",
            methods + accuracy_over_epochs(records),
            f"{seeds}{cut} It is no race: an epoch does not take every method the same time.",
        )
    ]
    # A single rank sends nothing, and a logarithmic axis has no zero.
    if min(record["bytes_per_step"] for record in records) > 0:
        formula = [record["label"] for record in records if not record["bytes_counted"]]
        source = f" Bytes of {', '.join(formula)} follow a formula; the others are counted."
        found.append(
            figure(
                "Test accuracy over bytes sent",
                methods + accuracy_over_bytes(records),
                "Further left at the same height: the same accuracy for fewer bytes. The axis of "
                f"bytes is logarithmic.{cut}{source if formula else ''} On a fast link, or inside "
                "one machine as here, few bytes need not mean less time.",
            )
        )
    found.append(
        figure(
            "Step time by part, measured here",
            legend((swatch(part), PART_NAMES[part]) for part in PARTS) + step_time_by_part(records),
            "A bar is one step: the median over steps of each part, averaged over ranks. Compute "
            "is forward, backward and the optimizer's own step. Select + copy is gradients in and "
            "out of the bucket, the check that they are finite, accumulate, select, apply; dense "
            "copies and checks, too. Communicate is agree, encode, exchange, merge, decode, and "
            f"waiting for others. All {records[0]['ranks']} ranks share this machine's cores and "
            "exchange through its memory, so dense communication is nearly free here.",
        )
    )
    return found


def race_figure(records: Sequence[Record]) -> str:
    """Show dense and gTop-k over seconds, here and over the link; nothing where there was none."""
    linked = over_link(records)
    if not linked:
        return ""
    pairs = {
        "This machine as it is": [records[0], records[METHODS.index("gtopk")]],
        f"An emulated link of {linked[0]['link']}": linked,
    }
    every = [record for pair in pairs.values() for record in pair]
    panels = "".join(
        f"<div><h4>{escape(where)}</h4>{loss_over_seconds(pair, every)}"
        f"<p>{prose(link_verdict(*pair).words)}.</p></div>"
        for where, pair in pairs.items()
    )
    return figure(
        "Training loss over seconds",
        f'{methods_legend(linked)}<div class="pair">{panels}</div>',
        f"Lower and further left is better. Both lines go through {linked[0]['epochs']} epochs; "
        "the two axes of seconds differ, each ends with the slower line. Time spent to measure the "
        "loss is left out. On the left there is no network between the ranks. On the right every "
        "message waits as long as its bytes would take on such a link of each rank, in each "
        "direction; all ranks still share this machine's cores.",
    )


def write_page(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the report of results.json's records to `path`; raise ValueError for other records."""
    path.write_text(page(checked(records)), encoding="utf-8")


def page(records: Sequence[Record]) -> str:
    race, linked = race_figure(records), over_link(records)
    records = records[: len(METHODS)]
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    return shared_page(
        TITLE,
        style,
        f"""<h1>{TITLE}</h1>
<p class="lead">{escape(what_was_run(records[0]))}</p>
{race and f"<h2>Here, and over a slow network</h2>{race}"}
<h2>{prose(f"{records[2]['label']}, beside {records[0]['label']}")}</h2>
<dl class="tiles">{tiles(records, linked)}</dl>
<h2>All four</h2>
<table>{table(records)}</table>
<p class="note">{prose(table_note(records))}</p>
{plots("Plots", figures(records))}<h2>What was run</h2>
<dl class="facts">{facts(records, linked)}</dl>""",
    )


def what_was_run(dense: Record) -> str:
    """Return the page's opening sentence."""
    return (
        f"{plural(dense['ranks'], 'MPI rank')} on one machine trained the same network on real "
        f"data, {data_name(dense)}, with four ways of adding up their gradients: "
        f"{plural(dense['epochs'], 'epoch')} each, from {plural(dense['seeds'], 'seed')}."
    )


def data_name(record: Record) -> str:
    """Return the data set in words."""
    return DATASETS.get(record["dataset"], record["dataset"])


def plural(number: int, noun: str) -> str:
    """Return "1 seed" or "5 seeds"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tiles(records: Sequence[Record], linked: Sequence[Record]) -> str:
    """Return gTop-k's bytes, accuracy and times beside dense's, at a glance."""
    dense, _, gtopk, _ = records
    sent, its = gtopk["bytes_per_step"], dense["bytes_per_step"]
    accuracy = accuracy_verdict(gtopk, dense)
    beside = f"{bytes_text(sent)} a step from each rank, dense {bytes_text(its)}"
    found = tile("Bytes sent", fraction(sent, its), beside, sent > its)
    difference = points_text(gtopk["accuracy"] - dense["accuracy"])
    found += tile("Test accuracy", difference, accuracy.words, accuracy.loss)
    times = {"Time of a run, measured here": (gtopk, dense)}
    if linked:
        times[f"Time of a run, emulated {linked[0]['link']}"] = linked[1], linked[0]
    for name, (mine, other) in times.items():
        outcome, loss = time_outcome(mine, other)
        ratio = f"{digits(mine['seconds'] / other['seconds'])} times"
        taken = f"{seconds_text(mine['seconds'])}, dense {seconds_text(other['seconds'])}"
        found += tile(name, ratio, f"{taken}: {outcome}", loss)
    return found


def table(records: Sequence[Record]) -> str:
    """Return one row per method; a cell that loses to dense says so in its class."""
    columns = (
        "Test accuracy",
        f"Epochs to {100 * level(records[0]):.0f} %",
        "Density",
        "Bytes per step and rank",
        "Bytes against dense",
        "Seconds per run",
        "Replicas identical",
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Method", *columns))
    rows = "".join(row(record, records[0], columns) for record in records)
    return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


def row(record: Record, dense: Record, columns: Sequence[str]) -> str:
    seeds, identical = record["accuracy_by_seed"], record["final_replicas_identical"]
    sd = f" ± {100 * statistics.stdev(seeds):.1f}" if len(seeds) > 1 else ""
    sent = record["bytes_per_step"]
    cells = (
        (f"{100 * record['accuracy']:.1f}{sd} %", accuracy_verdict(record, dense).loss),
        (escape(epochs_text(level(dense), record)), False),
        (f"{record['density']:g}", False),
        (bytes_text(sent) + ("" if record["bytes_counted"] else " †"), False),
        (fraction(sent, dense["bytes_per_step"]), sent > dense["bytes_per_step"]),
        (digits(record["seconds"]), time_outcome(record, dense).loss),
        ("yes" if identical else "no", not identical),
    )
    values = "".join(
        f'<td data-column="{name}"{" class=loss" if loss else ""}>{value}</td>'
        for name, (value, loss) in zip(columns, cells, strict=True)
    )
    return f'<tr><th scope="row">{escape(record["label"])}</th>{values}</tr>'


def table_note(records: Sequence[Record]) -> str:
    """Return the note below the table."""
    dense, topk, gtopk, equal_bytes = records
    k, more = count_text(gtopk["selected"]), count_text(equal_bytes["selected"])
    note = (
        "Accuracy on test images that no rank trained on; ± is the sample standard deviation over "
        "seeds. Behind a difference, ± is its standard error: methods are compared seed by seed, "
        "with the same split and the same initial weights. "
        f"Epochs to {100 * level(dense):.0f} %: until the mean over seeds first is that, a point "
        "below dense's end rounded down; sparse methods rise later. Every rank selects "
        f"{k} entries a step under {gtopk['label']}, as many as under "
        f"{topk['label']}, and {more} under {equal_bytes['label']}, to send about as many bytes as "
        f"{topk['label']}. Bytes are those a rank sends, not those it receives."
    )
    if all(record["bytes_counted"] for record in records):
        return note
    return (
        f"{note} † is not counted but a formula, 2(P-1)/P of the gradient's bytes on P ranks: "
        "no allreduce sends less, so it favours dense. All others are counted as they were sent."
    )


def facts(records: Sequence[Record], linked: Sequence[Record]) -> str:
    """Return names and values of what was run, and on what."""
    dense = records[0]
    machine = dense["machine"]
    batch = dense["batch_per_rank"]
    selected = (f"{count_text(record['selected'])} ({record['label']})" for record in records[1:])
    entries = {
        "Data": data_name(dense),
        "Network": f"{dense['model']}, {count_text(dense['parameters'])} parameters",
        "Ranks": f"{plural(dense['ranks'], 'MPI rank')} on one machine",
        "Batch": f"{batch} per rank, {batch * dense['ranks']} in all",
        "A run": f"{plural(dense['epochs'], 'epoch')}, {count_text(dense['steps'])} steps",
        "Runs": f"{plural(dense['seeds'], 'seed')} per method",
        "Entries selected": ", ".join(selected),
        "Processor": f"{machine['processor']}, {plural(machine['cores'], 'core')}",
        "MPI": machine["mpi"],
        "PyTorch": machine["torch"],
        "Python": machine["python"],
        "Started": machine["started"],
    }
    if linked:
        names = " and ".join(record["label"] for record in linked)
        seeds = plural(linked[0]["seeds"], "seed")
        entries["Over a link"] = f"emulated, {linked[0]['link']} for each rank: {names}, {seeds}"
    return list_of_facts(entries)
