"""`gtopk plan`: compare the methods on a cluster described with options.

It prints text 80 columns wide, in bold on a terminal for the fastest method.
"""

from __future__ import annotations

import argparse
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from collectives.cost import ERROR, Link
from collectives.cost_model import DEFAULT_RATES, Network, Prediction, Rates
from collectives.cost_model.calibration import measure_rates
from collectives.cost_model.schedules import FORMATS
from collectives.wire.format import USUAL_INDICES, VALUE_CODES

from ..errors import page
from ..planning.comparison import (
    LABELS,
    SHARDS,
    Cluster,
    Comparison,
    break_even_text,
    compare,
    deciding,
    pays_clearly,
)
from ..runtime.standard_streams import coloured, wants_colour
from ..units import (
    SPACE,
    bandwidth,
    bandwidth_text,
    bytes_text,
    count,
    count_text,
    counted,
    digits,
    duration,
    duration_text,
)
from .arguments import (
    PARAMETERS,
    STDOUT,
    Command,
    as_argument,
    fail,
    number_in,
    records_file,
    share,
    write_records,
)
from .charts import aligned, wrapped

_HEADINGS = ("method", "bytes", "msgs", "select", "merge", "wire", "step")
_EQUAL_HEADINGS = ("method", "density", "updates", "step")
# Bytes per parameter in addition to model, gradients and the plain optimizer's state, in float32 on
# CPUs: the residual, its copy for undoing a step, and a bucket's gradients if they are copied into
# one array. A test checks these numbers.
MEMORY: Final = {
    "dense": 4,
    "sparse": 8,
    "momentum": 16,
    "adam_correction": 28,
    "adam": 27,
    "adam, shards": 55,
}
_MEMORY = (
    f"Memory on each rank beside the model: about {MEMORY['sparse']} bytes a parameter "
    f"({MEMORY['momentum']} with momentum_correction, {MEMORY['adam_correction']} with "
    f"adam_correction, {MEMORY['adam']} where AdamW is wrapped, {MEMORY['adam, shards']} there by "
    f"shards); dense takes about {MEMORY['dense']}."
)
_OFF = f"{100 * ERROR:.0f}{SPACE}% off"


def render(comparison: Comparison, rates: Rates, rates_origin: str) -> list[str]:
    """Return the table's lines; ">" marks the cheapest method."""
    cluster, network = comparison.cluster, comparison.cluster.network
    formats = comparison.formats
    link, place = network.farthest, "inside the node" if network.is_one_node else "between nodes"
    ranks = counted(network.ranks, "rank")
    if network.ranks_per_node > 1:
        ranks += f", {network.ranks_per_node} a node"
    size = f"{count_text(cluster.length)} float32 values ({bytes_text(4.0 * cluster.length)})"
    backward = duration_text(cluster.backward_seconds)
    hidden = f" Dense hides behind {backward} of backward." if cluster.backward_seconds else ""
    times = "speed" if cluster.backward_seconds else "exchange"
    lines = [
        *wrapped(
            f"Modelled, not measured: {size}, {ranks}, {bandwidth_text(link.bits_per_second)} and "
            f"{duration_text(link.latency_seconds)} {place}, density {cluster.density:g}."
            f"{hidden} Selecting, coding, merging: {rates_origin}."
        ),
        "",
        *aligned([(*_HEADINGS, times), *(_row(each, comparison) for each in comparison.methods)]),
        *_legend(comparison),
        "",
        *wrapped(verdict(comparison, pays_clearly(cluster, rates, formats))),
    ]
    if network.ranks > 1:
        sensitivities = " or ".join(deciding(cluster, rates, formats))
        lines += wrapped(
            f"What decides: this verdict changes with {sensitivities}."
            if sensitivities
            else "Halving or doubling any one input does not change this verdict."
        )
        lines += wrapped(_MEMORY)
    if comparison.equal_bytes and network.ranks > 1:
        sent = comparison.equal_bytes[0].sent.most_bytes
        rows = (_equal_row(each, comparison) for each in comparison.equal_bytes)
        lines += [
            "",
            *wrapped(
                f"Equal k is not equal accuracy. For {bytes_text(sent)} a rank, these update:"
            ),
            *aligned([(*_EQUAL_HEADINGS, times), *rows]),
        ]
    return lines


def _legend(comparison: Comparison) -> list[str]:
    """Return the lines that explain the columns."""
    if comparison.cluster.backward_seconds:
        times = "speed: backward and step, as a multiple of dense's speed."
    else:
        times = "exchange: how many times as fast as dense's; not the speed of training."
    shards = ""
    if comparison.shards:  # `Rates.coding_of`: no rate of theirs was measured
        shards = ", and shards: half of all values a step in 1.6 bits; they may take less time"
    return [
        *wrapped(
            f"The line with > is the fastest (the tree is there to compare{shards}). bytes, msgs: "
            "sent by a rank, on average. "
            "select: finding the entries; for dense, copying gradients into one buffer and back. "
            "merge: with coding. step: time added to a step, with the ranks' agreement that all "
            "are ready."
        ),
        times,
    ]


def _row(found: Prediction, comparison: Comparison) -> tuple[str, ...]:
    mark = "> " if found is comparison.cheapest else "  "
    sparse = found.candidate.algorithm != "dense"
    messages = found.sent.messages
    return (
        mark + LABELS[found.candidate.algorithm] + found.candidate.wider,
        bytes_text(found.sent.bytes),
        f"{messages:.3g}" if messages < 1000 else count_text(messages),
        duration_text(found.select_seconds),
        duration_text(found.code_seconds + found.merge_seconds) if sparse else "-",
        duration_text(found.communicate_seconds),
        duration_text(comparison.exposed_seconds(found)),
        f"{digits(comparison.speedup(found))} x",
    )


def _equal_row(found: Prediction, comparison: Comparison) -> tuple[str, ...]:
    candidate = found.candidate
    return (
        "  " + LABELS[candidate.algorithm] + candidate.wider,
        f"{candidate.density:.3g}",
        count_text(found.updated),
        duration_text(comparison.exposed_seconds(found)),
        f"{digits(comparison.speedup(found))} x",
    )


def verdict(comparison: Comparison, clearly: bool | None) -> str:
    """Return the advice as text; clearly: whether to compress, None: too close to tell."""
    cheapest, dense = comparison.cheapest, comparison.dense
    if comparison.cluster.network.ranks == 1:
        return "A single rank sends nothing: there is nothing to compress."
    dense_adds, adds = map(duration_text, map(comparison.exposed_seconds, (dense, cheapest)))
    density = f"{cheapest.candidate.density:g}"
    where = break_even_text(comparison.break_even)
    hides = comparison.cluster.backward_seconds > 0
    if not comparison.pays:
        at_most = "" if hides else ", with nothing hidden behind the backward pass"
        return (
            f"Do not compress here: dense adds {dense_adds} to a step{at_most}, and no sparse "
            f"method less. At this latency it pays {where}."
        )
    # Give no advice if the difference is below the model's error.
    if clearly is None:
        return (
            f"Too close to tell: the best sparse method adds {adds} to a step, dense {dense_adds}, "
            f"and a time may be {_OFF}. Leave it dense, or measure both. At this latency "
            f"compression pays {where}."
        )
    algorithm = cheapest.candidate.algorithm
    # Its name in Compression.
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
        f"Density {density} may cost accuracy: {page('Tuning')}."
    )


# Exists only in a checkout, not in a wheel.
SIMULATED: Final = Path(__file__).parents[2] / "mpi_scripts" / "simulated_plan.py"

_PAYS: Final = {None: "never", math.inf: "always"}  # otherwise below or above a bandwidth
MOST_RANKS = 65_536
# Above this, floats lose the precision of single elements.
MOST_ELEMENTS = 10**15


def parser() -> Command:
    """Return the argument parser."""
    described = Command(
        "gtopk plan",
        "Estimate a step's gradient exchange on a cluster, from a model of its links, "
        "and whether compression pays there. Dense is what a job over MPI does between nodes "
        "without RDMA: long messages are answered before the next one is sent.",
        "gtopk plan --model resnet50 --ranks 32 --bandwidth 1gbit --latency 0.4ms "
        "--backward-ms 200\n\n"
        + "\n".join(["models:", *(f"  {name:18} {n:13,}" for name, n in PARAMETERS.items())]),
    )
    size = described.add_mutually_exclusive_group(required=True)
    size.add_argument("--elements", type=as_argument(count), help="parameters of the model")
    size.add_argument(
        "--model",
        type=as_argument(_model),
        choices=PARAMETERS,  # for shell completion
        metavar="NAME",
        help="or its name, see below",
    )
    option = described.option
    option("--ranks", count, None, "processes that train together", required=True)
    option("--bandwidth", bandwidth, None, "between nodes, such as 1gbit", required=True)
    option("--latency", duration, 50e-6, "per message between nodes; default: 50us")
    option("--ranks-per-node", count, 1, "ranks that share a node and its link")
    option("--node-bandwidth", bandwidth, 1e11, "bandwidth inside a node; default: 100gbit")
    option("--node-latency", duration, 5e-6, "latency inside a node; default: 5us")
    option("--density", share, 0.001, "share of entries sent")
    values = (
        "encoding of the values of sparse methods (dense sends float32): fewer bits round more, "
        "and the rounding error is sent later"
    )
    option("--values", None, "exact", values, choices=VALUE_CODES)
    option(
        "--backward-ms",
        milliseconds,
        0.0,
        "time of your model's backward pass, during which dense exchanges bucket by bucket; "
        "default: none, only the exchange is compared",
        metavar="MS",
    )
    described.flag(
        "--no-measure",
        "use assumed rates for selecting and merging instead of measuring this machine",
    )
    written = "write the figures as JSON; without FILE: print only them"
    option("--json", records_file, None, written, nargs="?", const=STDOUT, metavar="FILE")
    described.flag(
        "--simulate",
        "in a checkout of gtopk: send every message of the real code over shared links, by "
        f"SimGrid; more options: python mpi_scripts/{SIMULATED.name} --help",
    )
    return described


def _model(text: str) -> str:
    if text not in PARAMETERS:
        raise ValueError(
            f"'{text}' is none of {', '.join(PARAMETERS)}; for your own model give --elements, its "
            "number of parameters"
        )
    return text


def milliseconds(text: str) -> float:
    """Parse milliseconds, 0 or more, and return seconds."""
    return number_in("[0, inf)")(text) / 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison and return the exit code."""
    grammar = parser()
    # --simulate takes further options, which its own program parses.
    options, unknown = grammar.parse_known_args(arguments)
    if options.simulate:
        if not SIMULATED.exists():
            return fail(
                "plan",
                f"--simulate needs a checkout of gtopk, with mpi_scripts/{SIMULATED.name}: "
                "git clone its source, and call gtopk from there",
                code=2,
            )
        # Run it by path: mpi_scripts is not part of the installed package.
        code: int = runpy.run_path(str(SIMULATED))["main"](arguments)
        return code
    if unknown:
        grammar.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        comparison, rates, origin = comparison_of(options)
    except ValueError as error:
        return fail("plan", error, code=2)
    content, lines = as_record(comparison, rates, origin), render(comparison, rates, origin)
    return deliver(content, lines, options.json)


def comparison_of(options: argparse.Namespace) -> tuple[Comparison, Rates, str]:
    """Return the comparison of the methods, the coding rates, and where the rates come from.

    Raises ValueError for an impossible cluster.
    """
    if options.ranks > MOST_RANKS:
        raise ValueError(f"--ranks must be at most {MOST_RANKS:,}, got {options.ranks:,}")
    length = options.elements or PARAMETERS[options.model]
    if length > MOST_ELEMENTS:
        raise ValueError(f"--elements must be at most {MOST_ELEMENTS:,}, got {length:,}")
    if options.ranks_per_node > options.ranks:
        raise ValueError(
            f"--ranks-per-node must be at most --ranks {options.ranks}, "
            f"got {options.ranks_per_node}"
        )
    formats = [format for format in FORMATS if format.values == options.values]
    # Shards send no indices; the rate of their values is stored under raw indices.
    measured = {*formats, SHARDS.format._replace(indices="raw")}
    if options.no_measure:
        origin = "as assumed, not measured"
        rates = DEFAULT_RATES._replace(
            coding={format: DEFAULT_RATES.coding[format] for format in sorted(measured)}
        )
    else:
        from collectives.kernels import in_use

        rates, origin = (
            measure_rates(sorted(measured)),
            f"as measured on this machine now ({in_use()})",
        )
    network = Network(
        options.ranks,
        Link.of(options.bandwidth, options.latency),
        options.ranks_per_node,
        Link.of(options.node_bandwidth, options.node_latency),
    )
    # Inside a node, dense is the library's own allreduce, which does not confirm long messages.
    if network.is_one_node:
        network = network._replace(native_bytes=0)
    cluster = Cluster(length, network, options.density, options.backward_ms)
    return compare(cluster, rates, formats), rates, origin


def deliver(content: dict[str, Any], lines: list[str], file: Path | None) -> int:
    """Print the lines, unless the records go to stdout; write the records; return the exit code.

    On a terminal, the cheapest method's line is bold.
    """
    for line in lines if file != STDOUT else ():
        is_bold = line.startswith(">") and wants_colour(sys.stdout)
        print(coloured(line, "1;32") if is_bold else line)
    write_records(content, file)
    return 0


def as_record(comparison: Comparison, rates: Rates, origin: str) -> dict[str, Any]:
    """Return the comparison as a record for `write_records`.

    break_even_bits_per_second: null if compression pays never or always. In its two bounds, 0 means
    never and null always; the reverse if compression pays above a bandwidth.
    """

    def method(found: Prediction) -> dict[str, Any]:
        return {
            "algorithm": found.candidate.algorithm,
            "density": found.candidate.density,
            "widening": found.candidate.widening,
            "format": found.candidate.format,
            "agreement_seconds": found.agreement_seconds,
            "select_seconds": found.select_seconds,
            "code_seconds": found.code_seconds,
            "communicate_seconds": found.communicate_seconds,
            "merge_seconds": found.merge_seconds,
            "exposed_seconds": comparison.exposed_seconds(found),
            "speedup": comparison.speedup(found),
            "sent": found.sent,
            "updated": found.updated,
        }

    edge = comparison.break_even
    return {
        "modelled": True,
        "cluster": comparison.cluster,
        "rates": {
            **rates._asdict(),
            "coding": {"+".join(f): rate for f, rate in rates.coding.items()},
            "origin": origin,
        },
        "methods": [method(each) for each in comparison.methods],
        "equal_bytes": [method(each) for each in comparison.equal_bytes],
        "cheapest": comparison.cheapest.candidate.algorithm,
        "pays": _PAYS.get(edge.bits_per_second, "above" if edge.above else "below"),
        "break_even_bits_per_second": edge.bits_per_second,
        "break_even_bounds_bits_per_second": [edge.lowest, edge.highest],
    }
