"""The demo's report: one self-contained HTML page of plots, each with a note on how to read it.

Each method has a line; page.css of charts sets its colour and dashes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape

from ...units import bytes_text, count_text, counted, digits, points_text, seconds_text
from .. import charts
from ..charts import Axis, Lines, Point, Tile, figure, prose, share_text
from .verdicts import (
    METHODS,
    PARTS,
    Record,
    accuracy_verdict,
    epochs_text,
    fraction,
    level,
    link_verdict,
    mean_curve,
    over_link,
    time_outcome,
)

TITLE = "gTop-k beside dense: what the demo measured"
DATA = "scikit-learn's 8x8 handwritten digits"
PART_NAMES = {"compute": "compute", "select": "select + copy", "communicate": "communicate"}


def accuracy_over_epochs(records: Sequence[Record]) -> str:
    """Draw mean test accuracy after each epoch, in a band from the worst to the best seed."""
    found = {}
    for record in records:
        by_epoch = enumerate(zip(*record["accuracy_by_epoch"], strict=True), start=1)
        found[record["label"]] = [
            Point(epoch, statistics.fmean(seeds), min(seeds), max(seeds))
            for epoch, seeds in by_epoch
        ]
    title = "Test accuracy over epochs, one line per method"
    return accuracy_plot(title, found, records, "epochs")


def accuracy_over_bytes(records: Sequence[Record]) -> str:
    """Draw mean test accuracy over the bytes a rank has sent so far, on a logarithmic axis."""
    found = {record["label"]: sent_and_accuracy(record) for record in records}
    low = accuracy_axis(records).low
    # Ignore points below the cut accuracy axis: they must not stretch the x axis.
    seen = [point.x for points in found.values() for point in points if point.mean >= low]
    x = charts.horizontal(min(seen) / 1.5, max(seen), logarithmic=True)
    title = "Test accuracy over bytes sent per rank, one line per method"
    return accuracy_plot(title, found, records, "bytes", x)


def accuracy_plot(
    title: str, found: Lines, records: Sequence[Record], over: str, x: Axis | None = None
) -> str:
    y = accuracy_axis(records)
    plot = charts.lines_plot(title, found, "test accuracy", over=over, to_text=share_text, x=x, y=y)
    return charts.lines_legend(found) + plot


def sent_and_accuracy(record: Record) -> list[Point]:
    """Return the mean accuracy after each epoch, over the bytes that a rank has sent."""
    steps_per_epoch = record["steps"] / record["epochs"]
    means = (statistics.fmean(seeds) for seeds in zip(*record["accuracy_by_epoch"], strict=True))
    return [
        Point(record["bytes_per_step"] * steps_per_epoch * epoch, mean, mean, mean)
        for epoch, mean in enumerate(means, start=1)
    ]


def losses(records: Sequence[Record], labels: Sequence[str]) -> Lines:
    """Return mean training loss over seconds of training; no points for labels without a record."""
    found: dict[str, list[Point]] = {label: [] for label in labels}
    for record in records:
        curve = mean_curve(record)
        found[record["label"]] = [Point(seconds, loss, loss, loss) for seconds, loss in curve]
    return found


def loss_over_seconds(
    records: Sequence[Record], all_records: Sequence[Record], labels: Sequence[str]
) -> str:
    """Draw mean training loss over seconds of training, on a loss axis that fits all records."""
    every = [loss for record in all_records for _, loss in mean_curve(record)]
    y = charts.vertical(min(every) / 1.1, max(every) * 1.1, logarithmic=True)
    over = f"over an emulated link of {records[0]['link']}" if records[0]["link"] else "as it is"
    title = f"Training loss over seconds, {over}"
    return charts.lines_plot(title, losses(records, labels), "training loss", over="time", y=y)


def step_time_by_part(records: Sequence[Record]) -> str:
    """Draw one bar per method, stacked: compute, select, communicate."""
    rows = []
    for record in records:
        seconds = {part: record["step_seconds"][part] for part in PARTS}
        parts = [f"{PART_NAMES[part]} {seconds_text(s)}" for part, s in seconds.items() if s]
        rows.append((record["label"], seconds, " · ".join(parts)))
    title = "Measured time of a step, one bar per method, split by part"
    return charts.bars(title, rows, room=145.0)


def accuracy_axis(records: Sequence[Record]) -> Axis:
    """Return the accuracy axis; it starts 5 to 10 points below the worst final accuracy.

    It cuts off the climb of the first epochs, so that differences at the end are visible.
    """
    worst = min(seed[-1] for record in records for seed in record["accuracy_by_epoch"])
    return charts.vertical(max(0.0, (math.floor(20 * worst) - 1) / 20), 1.0)


def figures(records: Sequence[Record]) -> list[str]:
    """Return the figures of the runs without an emulated link."""
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
            accuracy_over_epochs(records),
            f"{seeds}{cut} This does not compare speed: the methods' epochs take different times.",
        )
    ]
    # A single rank sends nothing, and a logarithmic axis cannot show zero.
    if min(record["bytes_per_step"] for record in records) > 0:
        formula = [record["label"] for record in records if not record["bytes_counted"]]
        source = f" Bytes of {', '.join(formula)} follow a formula; the others are counted."
        found.append(
            figure(
                "Test accuracy over bytes sent",
                accuracy_over_bytes(records),
                "Further left at the same height: the same accuracy for fewer bytes. The axis of "
                f"bytes is logarithmic.{cut}{source if formula else ''} On a fast link, or inside "
                "one machine as here, few bytes need not mean less time.",
            )
        )
    found.append(
        figure(
            "Step time by part, measured here",
            charts.parts_legend(PART_NAMES) + step_time_by_part(records),
            "A bar is one step: the median over steps of each part, averaged over ranks. Compute "
            "is forward, backward and the optimizer's own step. Select + copy is gradients in and "
            "out of the bucket, the check that they are finite, accumulate, select, apply; dense "
            "copies and checks, too. Communicate is agree, encode, exchange, merge, decode, and "
            f"waiting for others. All {records[0]['ranks']} ranks share this machine's cores and "
            "exchange through its memory: the bars contain no network time.",
        )
    )
    return found


def race_figure(records: Sequence[Record]) -> str:
    """Show dense and gTop-k over seconds, without and with the link; "" without link records."""
    linked = over_link(records)
    if not linked:
        return ""
    pairs = {
        "This machine as it is": [records[0], records[METHODS.index("gtopk")]],
        f"An emulated link of {linked[0]['link']}": linked,
    }
    every = [record for pair in pairs.values() for record in pair]
    # Pass the labels of all methods, so that these two keep their colours.
    labels = [record["label"] for record in records[: len(METHODS)]]
    panels = "".join(
        f"<div><h4>{escape(where)}</h4>{loss_over_seconds(pair, every, labels)}"
        f"<p>{prose(link_verdict(*pair).words)}.</p></div>"
        for where, pair in pairs.items()
    )
    return figure(
        "Training loss over seconds",
        f'{charts.lines_legend(losses(linked, labels))}<div class="pair">{panels}</div>',
        "Lower and further left is better. Both lines go through "
        f"{counted(linked[0]['epochs'], 'epoch')}; "
        "the two axes of seconds differ, each ends with the slower line. Time spent to measure the "
        "loss is left out. On the left there is no network between the ranks. On the right every "
        "message waits as long as its bytes would take on such a link of each rank, in each "
        "direction; all ranks still share this machine's cores.",
    )


def page(records: Sequence[Record]) -> str:
    """Return the report on the records of results.json."""
    race, linked = race_figure(records), over_link(records)
    records = records[: len(METHODS)]
    return charts.page(
        TITLE,
        f"""<p class="lead">{escape(what_was_run(records[0]))}</p>
{race and f"<h2>Here, and over a slow network</h2>{race}"}
<h2>{prose(f"{records[2]['label']}, beside {records[0]['label']}")}</h2>
{charts.tiles(tiles(records, linked))}
<h2>All four</h2>
{charts.table({record["label"]: cells_of(record, records[0]) for record in records})}
<p class="note">{prose(table_note(records))}</p>
{charts.plots("Plots", figures(records))}{charts.facts(facts(records, linked))}""",
    )


def what_was_run(dense: Record) -> str:
    """Return the page's opening sentence."""
    return (
        f"{counted(dense['ranks'], 'MPI rank')} on one machine trained the same network on real "
        f"data, {DATA}, with four ways of adding up their gradients: "
        f"{counted(dense['epochs'], 'epoch')} each, from {counted(dense['seeds'], 'seed')}."
    )


def tiles(records: Sequence[Record], linked: Sequence[Record]) -> Iterator[Tile]:
    """Yield the key figures: gTop-k's bytes, accuracy and times compared with dense."""
    dense, _, gtopk, _ = records
    sent, dense_sent = gtopk["bytes_per_step"], dense["bytes_per_step"]
    accuracy = accuracy_verdict(gtopk, dense)
    beside = f"{bytes_text(sent)} a step from each rank, dense {bytes_text(dense_sent)}"
    yield Tile("Bytes sent", fraction(sent, dense_sent), beside, sent > dense_sent)
    difference = points_text(gtopk["accuracy"] - dense["accuracy"])
    yield Tile("Test accuracy", difference, accuracy.words, accuracy.loss)
    times = {"Time of a run, measured here": (gtopk, dense)}
    if linked:
        times[f"Time of a run, emulated {linked[0]['link']}"] = linked[1], linked[0]
    for name, (own, other) in times.items():
        outcome, loss = time_outcome(own, other)
        ratio = f"{digits(own['seconds'] / other['seconds'])} times"
        taken = f"{seconds_text(own['seconds'])}, dense {seconds_text(other['seconds'])}"
        yield Tile(name, ratio, f"{taken}: {outcome}", loss)


def cells_of(record: Record, dense: Record) -> dict[str, tuple[str, bool]]:
    """Return a method's table row by column: (text, whether it loses to dense)."""
    seeds, identical = record["accuracy_by_seed"], record["final_replicas_identical"]
    sd = f" ± {100 * statistics.stdev(seeds):.1f}" if len(seeds) > 1 else ""
    sent = record["bytes_per_step"]
    accuracy = f"{100 * record['accuracy']:.1f}{sd} %", accuracy_verdict(record, dense).loss
    against = fraction(sent, dense["bytes_per_step"]), sent > dense["bytes_per_step"]
    return {
        "Test accuracy": accuracy,
        f"Epochs to {100 * level(dense):.0f} %": (epochs_text(level(dense), record), False),
        "Density": (f"{record['density']:g}", False),
        "Bytes per step and rank": (
            bytes_text(sent) + ("" if record["bytes_counted"] else " †"),
            False,
        ),
        "Bytes against dense": against,
        "Seconds per run": (digits(record["seconds"]), time_outcome(record, dense).loss),
        "Replicas identical": ("yes" if identical else "no", not identical),
    }


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


def facts(records: Sequence[Record], linked: Sequence[Record]) -> dict[str, str]:
    """Return the settings, machine and software of the run, by name."""
    dense = records[0]
    machine = dense["machine"]
    batch = dense["batch_per_rank"]
    selected = (f"{count_text(record['selected'])} ({record['label']})" for record in records[1:])
    entries = {
        "Data": DATA,
        "Network": f"{dense['model']}, {count_text(dense['parameters'])} parameters",
        "Ranks": f"{counted(dense['ranks'], 'MPI rank')} on one machine",
        "Batch": f"{batch} per rank, {batch * dense['ranks']} in all",
        "A run": f"{counted(dense['epochs'], 'epoch')}, {counted(dense['steps'], 'step')}",
        "Runs": f"{counted(dense['seeds'], 'seed')} per method",
        "Entries selected": ", ".join(selected),
        "Processor": f"{machine['processor']}, {counted(machine['cores'], 'core')}",
        "MPI": machine["mpi"],
        "PyTorch": machine["torch"],
        "Python": machine["python"],
        "Started": machine["started"],
    }
    if linked:
        names = " and ".join(record["label"] for record in linked)
        seeds = counted(linked[0]["seeds"], "seed")
        entries["Over a link"] = f"emulated, {linked[0]['link']} for each rank: {names}, {seeds}"
    return entries
