"""A comparison as text of 80 columns, with colours where rich is installed and a terminal is."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Sequence

from collectives.cost import ERROR
from collectives.cost_model import Prediction, Rates
from collectives.wire.indices import USUAL_INDICES

from ...planning.comparison import LABELS, Comparison, deciding, pays_clearly, where_it_pays
from ...runtime.logs import wants_colour
from ...units import SPACE, bandwidth_text, bytes_text, count_text, digits, seconds_text

_WIDTH = 80
_HEADINGS = ("method", "bytes", "msgs", "select", "merge", "wire", "step")
_EQUAL_HEADINGS = ("method", "density", "updates", "step")
_ACCURACY = "docs/tuning.md"
# Measured beside model, gradients and optimizer: 8 million parameters, 2 ranks, CPU, Open MPI.
_MEMORY = (
    "Memory on each rank beside the model: about 16 bytes a parameter (24 with "
    "momentum_correction, 36 with adam_correction); dense takes about 10."
)
_OFF = f"{100 * ERROR:.0f}{SPACE}% off"


def render(comparison: Comparison, rates: Rates, rates_origin: str) -> list[str]:
    """Return the lines; those of the cheapest method begin with ">"."""
    cluster, network = comparison.cluster, comparison.cluster.network
    link, place = network.farthest, "inside the node" if network.is_one_node else "between nodes"
    where = f"{count_text(network.ranks)} rank{'s' * (network.ranks > 1)}"
    if network.ranks_per_node > 1:
        where += f", {network.ranks_per_node} a node"
    size = f"{count_text(cluster.length)} float32 values ({bytes_text(4.0 * cluster.length)})"
    backward = _time(cluster.backward_seconds)
    hidden = f" Dense hides behind {backward} of backward." if cluster.backward_seconds else ""
    times = "speed" if cluster.backward_seconds else "exchange"
    lines = [
        *_wrapped(
            f"Modelled, not measured: {size}, {where}, {bandwidth_text(link.bits_per_second)} and "
            f"{_time(link.latency_seconds)} {place}, density {cluster.density:g}."
            f"{hidden} Selecting, coding, merging: {rates_origin}."
        ),
        "",
        *_aligned([(*_HEADINGS, times), *(_row(each, comparison) for each in comparison.methods)]),
        *_legend(comparison),
        "",
        *_wrapped(verdict(comparison, pays_clearly(cluster, rates))),
    ]
    if network.ranks > 1:
        lines += _wrapped(_what_decides(deciding(cluster, rates)))
        lines += _wrapped(_MEMORY)
    if comparison.equal_bytes and network.ranks > 1:
        sent = comparison.equal_bytes[0].sent.most_bytes
        rows = (_equal_row(each, comparison) for each in comparison.equal_bytes)
        lines += [
            "",
            f"Equal k is not equal accuracy. For {bytes_text(sent)} a rank, these update:",
            *_aligned([(*_EQUAL_HEADINGS, times), *rows]),
        ]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _what_decides(turns: Sequence[str]) -> str:
    if not turns:
        return "Half or twice of any one input leaves this verdict as it is."
    return f"What decides: this verdict turns with {' or '.join(turns)}."


def _legend(comparison: Comparison) -> list[str]:
    """Return what the columns mean."""
    if comparison.cluster.backward_seconds:
        times = "speed: backward and step, as a multiple of dense's speed."
    else:
        times = "exchange: how many times as fast as dense's; not the speed of training."
    shards = ", and shards: a quarter of all values a step in 3 bits" if comparison.shards else ""
    return [
        *_wrapped(
            f"The line with > is the fastest (the tree is there to compare{shards}). bytes, msgs: "
            "sent by a rank, on average. "
            "select: finding the entries; for dense, copying gradients into one buffer and back. "
            "merge: with coding. step: time added to a step, with the ranks' agreement that all "
            "are ready."
        ),
        times,
    ]


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds < 10_000 else f"{count_text(seconds / 3600)} h"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False)


def _row(found: Prediction, comparison: Comparison) -> tuple[str, ...]:
    mark = "> " if found is comparison.cheapest else "  "
    sparse = found.candidate.algorithm != "dense"
    messages = found.sent.messages
    return (
        mark + LABELS[found.candidate.algorithm] + found.candidate.wider,
        bytes_text(found.sent.bytes),
        f"{messages:.3g}" if messages < 1000 else count_text(messages),
        _time(found.select_seconds),
        _time(found.code_seconds + found.merge_seconds) if sparse else "-",
        _time(found.communicate_seconds),
        _time(comparison.exposed_seconds(found)),
        f"{digits(comparison.speedup(found))} x",
    )


def _equal_row(found: Prediction, comparison: Comparison) -> tuple[str, ...]:
    candidate = found.candidate
    return (
        "  " + LABELS[candidate.algorithm] + candidate.wider,
        f"{candidate.density:.3g}",
        count_text(found.updated),
        _time(comparison.exposed_seconds(found)),
        f"{digits(comparison.speedup(found))} x",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def verdict(comparison: Comparison, clearly: bool | None) -> str:
    """Return what to do, in words; clearly: whether to compress, None: too close to tell."""
    cheapest, dense = comparison.cheapest, comparison.dense
    if comparison.cluster.network.ranks == 1:
        return "One rank has nobody to send to: there is nothing to compress."
    dense_adds, adds = map(_time, map(comparison.exposed_seconds, (dense, cheapest)))
    density = f"{cheapest.candidate.density:g}"
    where = where_it_pays(comparison.break_even)
    hides = comparison.cluster.backward_seconds > 0
    if not comparison.pays:
        at_most = "" if hides else ", with nothing hidden behind the backward pass"
        return (
            f"Do not compress here: dense adds {dense_adds} to a step{at_most}, and no sparse "
            f"method less. At this latency it pays {where}."
        )
    if clearly is None:
        return (
            f"Too close to tell: the best sparse method adds {adds} to a step, dense {dense_adds}, "
            f"and a time may be {_OFF}. Leave it dense, or measure both. At this latency "
            f"compression pays {where}."
        )
    algorithm = cheapest.candidate.algorithm
    name = {"topk-allgather": "topk"}.get(algorithm, algorithm)
    indices, values = cheapest.candidate.format
    wire = "" if indices == USUAL_INDICES else f', wire="{indices}"'
    rounding = "" if values == "exact" else f', values="{values}"'
    call = f"Compression.{name}(density={density}{wire}{rounding})"
    if hides:
        found = f"{call} pays here: it adds {adds} to a step, dense {dense_adds}."
    else:
        found = (
            "An upper bound, of the exchange alone, with nothing hidden behind the backward pass: "
            f"{call} takes {adds}, dense {dense_adds}."
        )
    less = "" if hides else " Training gains less: give --backward-ms for your model."
    return (
        f"{found} At this latency it pays {where}.{less} "
        f"Density {density} may cost accuracy: {_ACCURACY}."
    )


def show(lines: Sequence[str]) -> None:
    """Print the lines, the cheapest method's in bold on a terminal."""
    if not (wants_colour(sys.stdout) and importlib.util.find_spec("rich")):
        print("\n".join(lines))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        style = "bold green" if line.startswith(">") else None
        console.print(line, style=style, markup=False, soft_wrap=True)
