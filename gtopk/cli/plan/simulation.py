"""Simulation: what the methods of a comparison take where SimGrid shares the links among messages.

The model takes each round of an algorithm for as long as its largest message. The simulation sends
every message that the real code sends: it sees who waits for whom, and who shares a link.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from collectives.cost import Link
from collectives.errors import CollectiveError
from collectives.planning import Network, Prediction

from ...planning.comparison import Comparison, exposed_seconds
from ...units import bandwidth_text, digits, seconds_text
from ..arguments import as_argument, number_in, whole_number
from ..replay.platform import NODES_PER_SWITCH, Platform
from ..replay.simulate import find_python, simulate
from ..replay.traces import Reduction, trace_of
from .quantities import bandwidth, duration

MOST_RANKS: Final = 4096
_SITE_LATENCY_SECONDS: Final = 0.01


class Simulated(NamedTuple):
    """A method's wire time, simulated; None, and why, where its messages are too many."""

    prediction: Prediction
    wire_seconds: float | None
    problem: str = ""

    def step_seconds(self, backward_seconds: float) -> float | None:
        """Return by how much it lengthens a step: with the modelled selecting and merging."""
        if self.wire_seconds is None:
            return None
        modelled, wire = self.prediction, self.prediction.communicate_seconds
        exposed = exposed_seconds(modelled, 0.0) - wire + self.wire_seconds
        return max(0.0, exposed - backward_seconds) if is_dense(modelled) else exposed


def is_dense(prediction: Prediction) -> bool:
    """Tell whether it is of dense, which hides behind backward."""
    return prediction.candidate.algorithm == "dense"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --simulate, and what the tree of the simulated network is like."""
    add = parser.add_argument_group(
        "simulation", "every message of the real code, on shared links, by SimGrid"
    ).add_argument
    add("--simulate", action="store_true", help=f"up to {MOST_RANKS:,} ranks, each a thread")
    add(
        "--nodes-per-switch",
        type=as_argument(whole_number),
        help=f"default: {NODES_PER_SWITCH}",
    )
    add(
        "--oversubscription",
        type=as_argument(number_in("[1, inf)")),
        help="sum of a switch's node links over its uplink; default: 1",
    )
    add(
        "--sites",
        type=as_argument(whole_number),
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


def idle_option(options: argparse.Namespace) -> str | None:
    """Return why an option that was given would do nothing; None where all do something."""
    of_tree = ("nodes_per_switch", "oversubscription", "sites", "site_bandwidth", "site_latency")
    given = [
        "--" + name.replace("_", "-") for name in of_tree if getattr(options, name) is not None
    ]
    if given and not options.simulate:
        return f"{given[0]} is of the simulated network: add --simulate"
    of_sites = [name for name in given if name.startswith("--site-")]
    if of_sites and (options.sites or 1) == 1:
        return f"{of_sites[0]} is between sites: add --sites 2, or more"
    return None


def platform_of(options: argparse.Namespace, network: Network) -> Platform:
    """Return the tree that was asked for; raise ValueError where there is none."""
    if network.ranks > MOST_RANKS:
        raise ValueError(f"--simulate takes at most {MOST_RANKS:,} ranks, got {network.ranks:,}")
    far = None
    if options.site_bandwidth is not None:
        latency_seconds = options.site_latency
        if latency_seconds is None:
            latency_seconds = _SITE_LATENCY_SECONDS
        far = Link.of(options.site_bandwidth, latency_seconds)
    platform = Platform(
        network,
        options.nodes_per_switch or NODES_PER_SWITCH,
        options.oversubscription or 1.0,
        options.sites or 1,
        far,
    )
    platform.check()
    return platform


def simulated(comparison: Comparison, platform: Platform) -> list[Simulated]:
    """Return every method of a comparison, simulated.

    Raises SimulationError where SimGrid is not here.
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
    return Reduction(
        candidate.algorithm,
        cluster.network.ranks,
        cluster.length,
        cluster.length if is_dense(prediction) else candidate.selected(cluster.length),
        cluster.network.ranks_per_node,
        candidate.format,
        candidate.widening,
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
    """Return the simulation in the types of JSON."""
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
