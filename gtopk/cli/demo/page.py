"""The demo's report: plots with how to read them, as a page that needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...units import bytes_text, count_text, digits, points_text, seconds_text
from ..charts import facts as list_of_facts
from ..charts import legend, prose
from ..charts import page as shared_page
from .plots import (
    accuracy_floor,
    accuracy_over_bytes,
    accuracy_over_epochs,
    key,
    loss_over_seconds,
    modelled_time_over_bandwidth,
    part_key,
    step_time_by_part,
)
from .verdicts import (
    LATENCY_SECONDS,
    METHODS,
    PART_NAMES,
    PARTS,
    Record,
    accuracy_verdict,
    bytes_verdict,
    checked,
    epochs_text,
    fraction,
    heading,
    level,
    link_verdict,
    method_verdict,
    model_verdict,
    over_link,
    replicas_verdict,
    spread,
    time_outcome,
)


def figures(records: Sequence[Record]) -> str:
    """Return the four figures of the machine as it is."""
    methods = legend((key(record["method"]), record["label"]) for record in records)
    return "\n".join(
        (
            epochs_figure(records, methods),
            bytes_figure(records, methods),
            parts_figure(records),
            model_figure(records, methods),
        )
    )


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
    names = legend((key(record["method"]), record["label"]) for record in linked)
    return figure(
        "Training loss over seconds",
        f'{names}<div class="pair">{panels}</div>',
        f"Lower and further left is better. Both lines go through {linked[0]['epochs']} epochs; "
        "the two axes of seconds differ, each ends with the slower line. Time spent to measure the "
        "loss is left out. On the right every message waits as long as its bytes would take on "
        "such a link of each rank, in each direction.",
        "A network: on the left there is none between the ranks, on the right it is emulated, from "
        f"{'one seed' if linked[0]['seeds'] == 1 else 'several seeds'}, and all ranks still "
        "share this machine's cores.",
    )


def epochs_figure(records: Sequence[Record], methods: str) -> str:
    """Show accuracy over epochs."""
    reading = (
        "A line is the mean over seeds, its band goes from the worst to the best seed. What makes "
        "a seed easy or hard is the same for all methods: bands that overlap may "
        "still differ seed by seed, as the text above says."
    )
    if records[0]["seeds"] == 1:
        reading = "A line is the one seed that was run; another seed would draw another line."
    return figure(
        "Test accuracy over epochs",
        methods + accuracy_over_epochs(records),
        f"{reading} {axis_start(records)}",
        "A race: an epoch does not take every method the same time, nor the same bytes.",
    )


def bytes_figure(records: Sequence[Record], methods: str) -> str:
    """Show accuracy over bytes; nothing where a single rank sent none."""
    if min(record["bytes_per_step"] for record in records) <= 0:
        return ""
    formula = [record["label"] for record in records if not record["bytes_counted"]]
    source = f" Bytes of {', '.join(formula)} follow a formula; the others are counted."
    return figure(
        "Test accuracy over bytes sent",
        methods + accuracy_over_bytes(records),
        "Further left at the same height: the same accuracy for fewer bytes. The axis of bytes is "
        f"logarithmic. {axis_start(records)}" + (source if formula else ""),
        "Time: on a fast link, or inside one machine as here, few bytes need not mean less time.",
    )


def axis_start(records: Sequence[Record]) -> str:
    """Return a note on the part that the accuracy axis cuts off."""
    floor = accuracy_floor(records)
    if floor == 0:
        return ""
    return f"The accuracy axis starts at {100 * floor:.0f} %; the climb below is cut off."


def parts_figure(records: Sequence[Record]) -> str:
    """Show step time by part."""
    return figure(
        "Step time by part, measured here",
        legend((part_key(part), PART_NAMES[part]) for part in PARTS) + step_time_by_part(records),
        "A bar is one step: the median over steps of each part, averaged over ranks. Shorter is "
        "better. Compute is forward, backward and the optimizer's own step. Select + copy is "
        "gradients in and out of the bucket, the check that they are finite, accumulate, select, "
        "apply; dense copies and checks, too. Communicate is agree, encode, exchange, merge, "
        "decode, and waiting for others.",
        f"A cluster: all {records[0]['ranks']} ranks share this machine's cores and exchange "
        "through its memory, so dense communication is nearly free here, and waiting for a core "
        "counts as part of whatever was waiting.",
    )


def model_figure(records: Sequence[Record], methods: str) -> str:
    """Show the modelled step time over bandwidth."""
    dense, _, gtopk, _ = records
    found = model_verdict(dense, gtopk).words
    return figure(
        "Step time over bandwidth, from a model",
        methods + modelled_time_over_bandwidth(records),
        f"Lower is better. {found[0].upper()}{found[1:]}. Both axes are logarithmic.",
        "A measurement of any network: communication is the alpha-beta model, latency times "
        "messages plus bytes over bandwidth, with dense as the best known allreduce and an assumed "
        f"latency of {seconds_text(LATENCY_SECONDS)}. Compute, select and merge (with encode and "
        "decode) are the measured ones of this machine, whose cores the ranks share; one compute "
        "time for all methods, their median. The adding inside dense's allreduce is left out, "
        "which favours dense. Nothing overlaps.",
    )


def figure(title: str, drawing: str, reading: str, limits: str) -> str:
    """Return a figure: title, legend and drawing, how to read it, what it is not."""
    return (
        f"<figure><h3>{escape(title)}</h3>{drawing}<figcaption>"
        f"<p><b>How to read it.</b> {prose(reading)}</p>"
        f"<p><b>What it is not.</b> {prose(limits)}</p></figcaption></figure>"
    )


TITLE = "gTop-k beside dense: what the demo measured"
DATASETS = {"digits": "scikit-learn's 8x8 handwritten digits"}


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
<h2>In words</h2>
<ul class="findings">{findings(records)}</ul>
<h2>Plots</h2>
<div class="plots">
{figures(records)}
</div>
<h2>What was run</h2>
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
    sent, accuracy = (judge(gtopk, dense) for judge in (bytes_verdict, accuracy_verdict))
    contents = [
        (
            "Bytes sent",
            fraction(gtopk["bytes_per_step"], dense["bytes_per_step"]),
            (
                f"{bytes_text(gtopk['bytes_per_step'])} a step from each rank, "
                f"dense {bytes_text(dense['bytes_per_step'])}"
            ),
            sent.loss,
        ),
        (
            "Test accuracy",
            points_text(gtopk["accuracy"] - dense["accuracy"]),
            accuracy.words,
            accuracy.loss,
        ),
        time_tile("Time of a run, measured here", gtopk, dense),
    ]
    if linked:
        name = f"Time of a run, emulated {linked[0]['link']}"
        contents.append(time_tile(name, linked[1], linked[0]))
    return "".join(
        f'<div class="{"tile loss" if loss else "tile"}">'
        f"<dt>{name}</dt>"
        f'<dd class="value">{value}</dd><dd class="detail">{prose(detail)}</dd></div>'
        for name, value, detail, loss in contents
    )


def time_tile(name: str, gtopk: Record, dense: Record) -> tuple[str, str, str, bool]:
    """Return a tile's name, value and detail, and whether it is a loss."""
    outcome, loss = time_outcome(gtopk, dense)
    mine, its = gtopk["seconds"], dense["seconds"]
    detail = f"{seconds_text(mine)}, dense {seconds_text(its)}: {outcome}"
    return name, f"{digits(mine / its)} times", detail, loss


COLUMNS = (
    "Density",
    "Bytes per step and rank",
    "Bytes against dense",
    "Seconds per run",
    "Replicas identical",
)


def table(records: Sequence[Record]) -> str:
    """Return one row per method."""
    columns = ("Test accuracy", heading(level(records[0])), *COLUMNS)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Method", *columns))
    rows = "".join(row(record, records[0], columns) for record in records)
    return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


def row(record: Record, dense: Record, columns: Sequence[str]) -> str:
    """Return a method's row; a cell that loses to dense says so in its class."""
    identical = record["final_replicas_identical"]
    cells = (
        (accuracy_cell(record), accuracy_verdict(record, dense).loss),
        (escape(epochs_text(level(dense), record)), False),
        (f"{record['density']:g}", False),
        (bytes_text(record["bytes_per_step"]) + ("" if record["bytes_counted"] else " †"), False),
        (fraction(record["bytes_per_step"], dense["bytes_per_step"]), False),
        (digits(record["seconds"]), time_outcome(record, dense).loss),
        ("yes" if identical else "no", not identical),
    )
    values = "".join(
        f'<td data-column="{name}"{" class=loss" if loss else ""}>{value}</td>'
        for name, (value, loss) in zip(columns, cells, strict=True)
    )
    return f'<tr><th scope="row">{escape(record["label"])}</th>{values}</tr>'


def accuracy_cell(record: Record) -> str:
    """Return mean and spread; one seed has none."""
    sd = "" if record["seeds"] < 2 else f" ± {100 * spread(record):.1f}"
    return f"{100 * record['accuracy']:.1f}{sd} %"


def table_note(records: Sequence[Record]) -> str:
    """Return the note below the table."""
    dense, topk, gtopk, equal_bytes = records
    k, more = count_text(gtopk["selected"]), count_text(equal_bytes["selected"])
    note = (
        "Accuracy on test images that no rank trained on; ± is the sample standard deviation over "
        "seeds. Behind a difference, ± is its standard error: methods are compared seed by seed, "
        "with the same split and the same initial weights. "
        f"{heading(level(dense))}: until the mean over seeds first is that, a point below dense's "
        "end rounded down; sparse methods rise later. Every rank selects "
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


def findings(records: Sequence[Record]) -> str:
    """Return what the records show in words, an entry per method and one on the replicas."""
    dense, topk, *_ = records
    found = {record["label"]: method_verdict(record, dense, topk) for record in records[1:]}
    found["Replicas"] = replicas_verdict(records)
    return "".join(
        f"<li{' class=loss' if verdict.loss else ''}><h3>{escape(subject)}</h3>"
        f"<p>{prose(verdict.words)}</p></li>"
        for subject, verdict in found.items()
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
