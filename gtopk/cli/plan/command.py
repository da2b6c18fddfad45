"""`gtopk plan` as people call it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Network, Prediction, Rates
from collectives.cost_model.calibration import measure_rates
from collectives.cost_model.formats import FORMATS
from collectives.wire.values import VALUE_CODES

from ...planning.comparison import SHARDS, Cluster, Comparison, compare
from ..arguments import PARAMETERS, as_argument, bandwidth, count, duration, number_in, share
from .show import render, show

# In a checkout; a wheel is without it.
SIMULATED: Final = Path(__file__).parents[3] / "mpi_scripts" / "simulated_plan.py"

_PAYS: Final = {None: "never", math.inf: "always"}  # else below a bandwidth, or above
MOST_RANKS = 65_536
MOST_ELEMENTS = 10**15  # beyond, a float cannot tell one of them from none


def parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    described = argparse.ArgumentParser(
        prog="gtopk plan",
        description="Estimate a step's gradient exchange on a cluster, from a model of its links, "
        "and whether compression pays there. Dense is what a job over MPI does between nodes "
        "without RDMA: long messages are answered before the next one is sent.",
        epilog="example:\n"
        "  gtopk plan --model resnet50 --ranks 32 --bandwidth 1gbit --latency 0.4ms "
        "--backward-ms 200\n\n"
        + "\n".join(["models:", *(f"  {name:18} {n:13,}" for name, n in PARAMETERS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = described.add_mutually_exclusive_group(required=True)
    size.add_argument("--elements", type=as_argument(count), help="parameters of the model")
    size.add_argument("--model", choices=PARAMETERS, metavar="NAME", help="or its name, see below")
    described.add_argument(
        "--ranks", type=as_argument(count), required=True, help="processes that train together"
    )
    described.add_argument(
        "--bandwidth",
        type=as_argument(bandwidth),
        required=True,
        help="between nodes, such as 1gbit",
    )
    described.add_argument(
        "--latency",
        type=as_argument(duration),
        default=50e-6,
        help="per message between nodes; default: 50us",
    )
    described.add_argument(
        "--ranks-per-node",
        type=as_argument(count),
        default=1,
        help="ranks that share a node and its link; default: %(default)s",
    )
    described.add_argument(
        "--node-bandwidth",
        type=as_argument(bandwidth),
        default=1e11,
        help="bandwidth inside a node; default: 100gbit",
    )
    described.add_argument(
        "--node-latency",
        type=as_argument(duration),
        default=5e-6,
        help="latency inside a node; default: 5us",
    )
    described.add_argument(
        "--density",
        type=as_argument(share),
        default=0.001,
        help="share of entries sent; default: %(default)s",
    )
    described.add_argument(
        "--values",
        choices=VALUE_CODES,
        default="exact",
        help="how values travel: fewer bits, more rounding, whose error is sent later; default: "
        "%(default)s",
    )
    described.add_argument(
        "--backward-ms",
        type=as_argument(milliseconds),
        default=0.0,
        metavar="MS",
        help="time of your model's backward pass, during which dense exchanges bucket by bucket; "
        "default: none, only the exchange is compared",
    )
    described.add_argument(
        "--no-measure",
        action="store_true",
        help="use assumed rates for selecting and merging instead of measuring this machine",
    )
    described.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the figures as JSON; without FILE: print only them",
    )
    described.add_argument(
        "--simulate",
        action="store_true",
        help="in a checkout of gtopk: send every message of the real code over shared links, by "
        f"SimGrid; more options: python mpi_scripts/{SIMULATED.name} --help",
    )
    return described


def milliseconds(text: str) -> float:
    """Return milliseconds, 0 or more, in seconds."""
    return number_in("[0, inf)")(text) / 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison and return the exit code."""
    grammar = parser()
    options, unknown = grammar.parse_known_args(arguments)
    if options.simulate:
        if not SIMULATED.exists():
            return fail(
                f"--simulate needs a checkout of gtopk, with mpi_scripts/{SIMULATED.name}: "
                "git clone its source, and call gtopk from there"
            )
        code: int = runpy.run_path(str(SIMULATED))["main"](arguments)
        return code
    if unknown:
        grammar.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        comparison, rates, origin = compared(options)
    except ValueError as error:
        return fail(str(error))
    content, lines = as_record(comparison, rates, origin), render(comparison, rates, origin)
    return deliver(content, lines, options.json)


def compared(options: argparse.Namespace) -> tuple[Comparison, Rates, str]:
    """Return the methods compared, by which rates, and where these are from.

    Raises ValueError for a cluster that cannot be.
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
    if network.is_one_node:
        network = network._replace(native_bytes=0)
    cluster = Cluster(length, network, options.density, options.backward_ms)
    return compare(cluster, rates, formats), rates, origin


def deliver(content: dict[str, Any], lines: list[str], file: str | None) -> int:
    """Print the lines, or with the file "-" only the JSON, write the file, return the exit code."""
    record = json.dumps(content, indent=1)
    if file == "-":
        print(record)
        return 0
    show(lines)
    if file:
        try:
            Path(file).write_text(record + "\n", encoding="utf-8")
        except OSError as error:
            return fail(f"--json {file} cannot be written: {error.strerror}")
    return 0


def fail(reason: str) -> int:
    """Print why nothing can be estimated, and return the exit code."""
    print(f"gtopk plan: {reason}", file=sys.stderr)
    return 2


def as_record(comparison: Comparison, rates: Rates, origin: str) -> dict[str, Any]:
    """Return the comparison in the types of JSON.

    break_even_bits_per_second: null where it pays never, or always; of its two bounds, 0 is at no
    bandwidth and null at every one, or the other way round where it pays above a bandwidth.
    """
    cluster = comparison.cluster

    def method(found: Prediction) -> dict[str, Any]:
        return {
            "algorithm": found.candidate.algorithm,
            "density": found.candidate.density,
            "widening": found.candidate.widening,
            "format": found.candidate.format._asdict(),
            "agreement_seconds": found.agreement_seconds,
            "select_seconds": found.select_seconds,
            "code_seconds": found.code_seconds,
            "communicate_seconds": found.communicate_seconds,
            "merge_seconds": found.merge_seconds,
            "exposed_seconds": comparison.exposed_seconds(found),
            "speedup": comparison.speedup(found),
            "sent": found.sent._asdict(),
            "updated": found.updated,
        }

    edge = comparison.break_even
    return {
        "modelled": True,
        "cluster": {
            **dataclasses.asdict(cluster),
            "network": {
                **cluster.network._asdict(),
                "between": cluster.network.between._asdict(),
                "within": cluster.network.within and cluster.network.within._asdict(),
            },
        },
        "rates": {
            **rates._asdict(),
            "coding": {"+".join(f): rate._asdict() for f, rate in rates.coding.items()},
            "origin": origin,
        },
        "methods": [method(each) for each in comparison.methods],
        "equal_bytes": [method(each) for each in comparison.equal_bytes],
        "cheapest": comparison.cheapest.candidate.algorithm,
        "pays": _PAYS.get(edge.bits_per_second, "above" if edge.above else "below"),
        "break_even_bits_per_second": _json_number(edge.bits_per_second),
        "break_even_bounds_bits_per_second": [
            _json_number(edge.lowest),
            _json_number(edge.highest),
        ],
    }


def _json_number(value: float | None) -> float | None:
    """Return it; null, where JSON knows no infinity."""
    return None if value is None or math.isinf(value) else value
