"""The report's plots as HTML figures, each with how to read it and what it is not."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...units import seconds_text
from ..charts.markup import prose
from ..charts.page import legend
from .marks import key
from .model import LATENCY_SECONDS
from .plots import (
    accuracy_floor,
    accuracy_over_bytes,
    accuracy_over_epochs,
    loss_over_seconds,
    modelled_time_over_bandwidth,
    part_key,
    step_time_by_part,
)
from .record import METHODS, PART_NAMES, PARTS, Record, over_link
from .verdicts import link_verdict, model_verdict


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
        "a seed easy or hard is the same for all methods: bands that overlap can still be told "
        "apart seed by seed, as the words above do."
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
    """Return what the accuracy axis hides."""
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
