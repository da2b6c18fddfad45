"""`gtopk plan`, with each method also simulated by SimGrid, where messages share links.

gtopk plan --simulate --model resnet50 --ranks 8 --bandwidth 1gbit        calls this program
python mpi_scripts/simulated_plan.py --help                               all options

In the model, each round of an algorithm takes as long as its largest message. The simulation sends
every message of the real code, so it includes waiting ranks and shared links.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.cost import Link
from collectives.cost_model import Network, Prediction
from collectives.errors import CollectiveError
from gtopk.cli import plan
from gtopk.cli.arguments import as_argument, fail, number_in, whole_number
from gtopk.cli.plan import render as render_plan
from gtopk.planning.comparison import LABELS, Comparison
from gtopk.units import bandwidth, bandwidth_text, digits, duration, seconds_text
from mpi_scripts.replay.simulate import (
    NODES_PER_SWITCH,
    Platform,
    SimulationError,
    find_python,
    simulate,
)
from mpi_scripts.replay.traces import Reduction, trace_of

MOST_RANKS: Final = 4096
_SITE_LATENCY_SECONDS: Final = 0.01


class Simulated(NamedTuple):
    """A method's simulated wire time; None, with the reason, if it has too many messages."""

    prediction: Prediction
    wire_seconds: float | None
    problem: str = ""

    def step_seconds(self, backward_seconds: float) -> float | None:
        """Return the seconds that it adds to a step, including modelled selection and merging."""
        if self.wire_seconds is None:
            return None
        modelled, wire = self.prediction, self.prediction.communicate_seconds
        exposed = modelled.seconds - wire + self.wire_seconds
        return max(0.0, exposed - backward_seconds) if is_dense(modelled) else exposed


def is_dense(prediction: Prediction) -> bool:
    """Tell whether a prediction is for dense, which hides behind backward."""
    return prediction.candidate.algorithm == "dense"


def parser() -> argparse.ArgumentParser:
    """Return the grammar of `gtopk plan`, with options for the tree of the simulated network."""
    described = plan.parser()
    add = described.add_argument_group(
        "simulation", f"by SimGrid, of up to {MOST_RANKS:,} ranks, each a thread"
    ).add_argument
    add(
        "--nodes-per-switch",
        type=as_argument(whole_number),
        default=NODES_PER_SWITCH,
        help="default: %(default)s",
    )
    add(
        "--oversubscription",
        type=as_argument(number_in("[1, inf)")),
        default=1.0,
        help="sum of a switch's node links over its uplink; default: 1",
    )
    add(
        "--sites",
        type=as_argument(whole_number),
        default=1,
        help="number of sites to spread the switches over; default: 1",
    )
    add(
        "--site-bandwidth",
        type=as_argument(bandwidth),
        help="bandwidth of a site's link to the others",
    )
    add(
        "--site-latency",
        type=as_argument(duration),
        help=f"latency between sites; default: {1e3 * _SITE_LATENCY_SECONDS:g}ms",
    )
    return described


def platform_of(options: argparse.Namespace, network: Network) -> Platform:
    """Return the tree that the options describe; raise ValueError if it is impossible."""
    if network.ranks > MOST_RANKS:
        raise ValueError(f"--simulate takes at most {MOST_RANKS:,} ranks, got {network.ranks:,}")
    for name in ("site_bandwidth", "site_latency"):
        if options.sites == 1 and getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is between sites: add --sites 2, or more")
    far = None
    if options.site_bandwidth is not None:
        latency_seconds = options.site_latency
        if latency_seconds is None:
            latency_seconds = _SITE_LATENCY_SECONDS
        far = Link.of(options.site_bandwidth, latency_seconds)
    platform = Platform(
        network, options.nodes_per_switch, options.oversubscription, options.sites, far
    )
    platform.check()
    return platform


def simulated(comparison: Comparison, platform: Platform) -> list[Simulated]:
    """Simulate every method of a comparison.

    Raises SimulationError if SimGrid is not installed.
    """
    python = find_python()
    found = []
    for prediction in (comparison.dense, *comparison.sparse):
        if sys.stderr.isatty():
            name = prediction.candidate.algorithm
            print(f"\r\x1b[Ksimulating {name}", end="\r", file=sys.stderr, flush=True)
        try:
            trace = trace_of(_reduction(prediction, comparison))
        except (ValueError, CollectiveError) as error:  # too many messages, or threads
            found.append(Simulated(prediction, None, str(error)))
            continue
        found.append(Simulated(prediction, simulate(trace, platform, python)))
    return found


def _reduction(prediction: Prediction, comparison: Comparison) -> Reduction:
    cluster, candidate = comparison.cluster, prediction.candidate
    native_bytes = cluster.network.native_bytes
    return Reduction(
        candidate.algorithm,
        cluster.network.ranks,
        cluster.length,
        cluster.length if is_dense(prediction) else candidate.selected(cluster.length),
        cluster.network.ranks_per_node,
        candidate.format,
        candidate.widening,
        sys.maxsize if native_bytes is None else native_bytes,
    )


def render(
    found: Sequence[Simulated], platform: Platform, comparison: Comparison, labels: dict[str, str]
) -> list[str]:
    """Return the lines of a table of 80 columns."""
    backward = comparison.cluster.backward_seconds
    lines = ["", "Simulated by SimGrid: every message of the real code, links shared among them."]
    tree = f"{platform.nodes_per_switch} nodes a switch"
    if platform.oversubscription > 1.0:
        tree += f", uplinks {digits(platform.oversubscription)} times oversubscribed"
    if platform.sites > 1 and platform.far is not None:
        tree += f", {platform.sites} sites with {bandwidth_text(platform.far.bits_per_second)}"
        tree += f" and {seconds_text(platform.far.latency_seconds)} between them"
    lines += [f"{tree}.", f"  {'method':18} {'wire':>10} {'modelled':>10} {'step':>10}"]
    for each in found:
        candidate = each.prediction.candidate
        label = labels[candidate.algorithm] + candidate.wider
        step = each.step_seconds(backward)
        if each.wire_seconds is None or step is None:
            lines.append(f"  {label:18} not simulated: {each.problem}")
            continue
        wire, modelled = each.wire_seconds, each.prediction.communicate_seconds
        lines.append(
            f"  {label:18} {seconds_text(wire):>10} {seconds_text(modelled):>10} "
            f"{seconds_text(step):>10}"
        )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def as_record(found: Sequence[Simulated], platform: Platform, backward: float) -> dict[str, Any]:
    """Return the simulation in JSON's types."""
    return {
        "simulator": "SimGrid",
        "nodes_per_switch": platform.nodes_per_switch,
        "oversubscription": platform.oversubscription,
        "sites": platform.sites,
        "far": platform.far and platform.far._asdict(),
        "methods": [
            {
                "algorithm": each.prediction.candidate.algorithm,
                "wire_seconds": each.wire_seconds,
                "modelled_wire_seconds": each.prediction.communicate_seconds,
                "step_seconds": each.step_seconds(backward),
                "problem": each.problem,
            }
            for each in found
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison, modelled and simulated, and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        comparison, rates, origin = plan.comparison_of(options)
        platform = platform_of(options, comparison.cluster.network)
        found = simulated(comparison, platform)
    except (SimulationError, ValueError) as error:
        return fail("plan", error, code=2)
    content = plan.as_record(comparison, rates, origin)
    content["simulated"] = as_record(found, platform, options.backward_ms)
    lines = render_plan(comparison, rates, origin)
    lines += render(found, platform, comparison, LABELS)
    return plan.deliver(content, lines, options.json)


if __name__ == "__main__":
    sys.exit(main())
