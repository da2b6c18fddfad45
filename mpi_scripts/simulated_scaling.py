"""Simulate reductions on trees of many hosts with SimGrid, from every message of the real code.

python mpi_scripts/simulated_scaling.py --ranks 8 64 512 --rates 1gbit 10gbit --plot FILE.svg
python mpi_scripts/simulated_scaling.py --ranks 64 512 --sites 2 --far 1gbit --far-latency 20ms

Seconds are simulated, not measured. They cover the wire alone, without selecting, encoding and
merging, as in `simulated_plan.py` for one cluster. A trace is recorded once for all bandwidths.
For the hierarchical reduction a site is a node; it needs more than one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.cost import Link
from collectives.cost_model import Network
from collectives.errors import CollectiveError
from gtopk.cli import charts
from gtopk.cli.arguments import PARAMETERS, as_argument, number_in, output_file, whole_number
from gtopk.units import bandwidth, count_text, duration, seconds_text
from mpi_scripts.replay.simulate import (
    NODES_PER_SWITCH,
    Platform,
    SimulationError,
    find_python,
    simulate,
)
from mpi_scripts.replay.traces import Reduction, trace_of

METHODS: Final = ("dense", "topk-allgather", "gtopk-tree", "gtopk", "oktopk", "hierarchical")
DENSITY: Final = 0.001
HEAD: Final = 36  # above the panels, with one line of methods' names
LINE: Final = 20
LATENCY_SECONDS: Final = 50e-6


class Tree(NamedTuple):
    """The tree of switches and sites above the hosts; see `Platform`."""

    nodes_per_switch: int = NODES_PER_SWITCH
    oversubscription: float = 1.0
    sites: int = 1
    far: Link | None = None


# Seconds by rate, method and ranks; None where there are too many messages.
Found = Mapping[str, Mapping[str, Mapping[int, float | None]]]

STYLE: Final = """
svg { color-scheme: light dark; --ground: #fff; --text: #1b2026; --rule: #e4e8ec; }
@media (prefers-color-scheme: dark) { svg { --ground: #12161b; --text: #e6eaee; --rule: #303943; } }
.ground { fill: var(--ground); } .grid, .axis { stroke: var(--rule); fill: none; }
text { font: 13px system-ui, Helvetica, Arial, sans-serif; fill: var(--text); }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.line { fill: none; stroke: var(--ink); stroke-width: 2; } .label { fill: var(--ink); }
.m0 { --ink: #8a6d00; } .m1 { --ink: #c2452d; } .m2 { --ink: #7b61c9; } .m3 { --ink: #0072b2; }
.m4 { --ink: #00855f; } .m5 { --ink: #a0459b; }
@media (prefers-color-scheme: dark) { .m0 { --ink: #e0b84c; } .m1 { --ink: #ff8a70; }
  .m2 { --ink: #b9a6ff; } .m3 { --ink: #5ab4ee; } .m4 { --ink: #3fcf9f; } .m5 { --ink: #e08bdb; } }
"""


def simulated(
    methods: Sequence[str],
    ranks: Sequence[int],
    rates: Sequence[str],
    tree: Tree,
    python: str,
) -> Found:
    """Return the seconds of every method at every rate on every number of hosts.

    Raises ValueError for an impossible rate or tree before anything is simulated.
    """
    platforms = {
        (size, rate): Platform(
            Network(size, Link.of(bandwidth(rate), LATENCY_SECONDS)), **tree._asdict()
        )
        for size in ranks
        for rate in rates
    }
    for platform in platforms.values():
        platform.check()
    length = PARAMETERS["resnet50"]
    found: dict[str, dict[str, dict[int, float | None]]] = {
        rate: {method: {} for method in methods} for rate in rates
    }
    for method in methods:
        for size in ranks:
            k = length if method == "dense" else round(DENSITY * length)
            try:
                trace = trace_of(Reduction(method, size, length, k, size // tree.sites))
            except (ValueError, CollectiveError) as error:  # too many messages, or threads
                print(f"{method} on {size:,} hosts: {error}", file=sys.stderr)
                trace = None
            for rate in rates:
                seconds = simulate(trace, platforms[size, rate], python) if trace else None
                found[rate][method][size] = seconds
    return found


def table(found: Found, ranks: Sequence[int]) -> list[str]:
    """Return the rows of a table in Markdown."""
    lines = [
        f"| | |{''.join(f' {size:,} hosts |' for size in ranks)}",
        "|---|---|" + "---|" * len(ranks),
    ]
    for rate, methods in found.items():
        for method, seconds in methods.items():
            cells = ("refused" if s is None else seconds_text(s) for s in seconds.values())
            lines.append(f"| {rate} | {method} | {' | '.join(cells)} |")
    return lines


def picture(found: Found, ranks: Sequence[int]) -> str:
    """Return an SVG: a panel for each rate, two in a row, on common axes.

    Raises ValueError if no time is above 0, as with a single host.
    """
    columns = min(2, len(found))
    a_line = 3 * columns
    drawn = next(iter(found.values()))
    head = HEAD + LINE * ((len(drawn) - 1) // a_line)
    all_seconds = [s for m in found.values() for of in m.values() for s in of.values() if s]
    if not all_seconds:
        raise ValueError("--plot has nothing to draw: no method took any time")
    x = charts.horizontal(min(ranks), max(ranks), logarithmic=True)
    y = charts.vertical(min(all_seconds) / 1.5, 1.5 * max(all_seconds), logarithmic=True)
    panels = []
    for place, (rate, methods) in enumerate(found.items()):
        x_ticks = {float(size): count_text(size) for size in ranks}
        y_ticks = {tick: seconds_text(tick) for tick in y.ticks()}
        parts = [charts.frame(x, y, x_ticks, y_ticks, ("hosts", f"{rate}, simulated"))]
        for method, seconds in methods.items():
            points = [(x.place(size), y.place(s)) for size, s in seconds.items() if s]
            parts.append(f'<g class="m{METHODS.index(method)}">{charts.line(points)}</g>')
        row, column = divmod(place, columns)
        at = f"{charts.WIDTH * column} {head + charts.HEIGHT * row}"
        panels.append(f'<g transform="translate({at})">{"".join(parts)}</g>')
    labels = [
        charts.text((58 + 140 * (place % a_line), 20 + LINE * (place // a_line)), method, "label")
        for place, method in enumerate(drawn)
    ]
    words = [
        f'<g class="m{METHODS.index(method)}">{label}</g>'
        for method, label in zip(drawn, labels, strict=True)
    ]
    width, height = columns * charts.WIDTH + 12, head + charts.HEIGHT * -(-len(found) // columns)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Simulated seconds of each method over hosts, a panel for each bandwidth">'
        f'<style>{STYLE}</style><rect class="ground" width="{width}" height="{height}"/>'
        + "".join([*words, *panels])
        + "</svg>\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, draw the picture, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = as_argument(whole_number)
    parser.add_argument("--ranks", type=whole, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit", "25gbit", "100gbit"])
    parser.add_argument("--nodes-per-switch", type=whole, default=NODES_PER_SWITCH)
    wide = as_argument(number_in("[1, inf)"))
    parser.add_argument("--oversubscription", type=wide, default=1.0, help="of a switch's uplink")
    parser.add_argument("--sites", type=whole, default=1, help="over which the switches are dealt")
    parser.add_argument(
        "--far",
        type=as_argument(bandwidth),
        default="1gbit",
        help="bandwidth of a site's link to the others",
    )
    parser.add_argument(
        "--far-latency", type=as_argument(duration), default="20ms", help="between sites"
    )
    parser.add_argument("--plot", type=as_argument(output_file), help="SVG to write")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:5])
    options = parser.parse_args(arguments)
    sites: int = options.sites
    far = Link.of(options.far, options.far_latency) if sites > 1 else None
    tree = Tree(options.nodes_per_switch, options.oversubscription, sites, far)
    if "hierarchical" in options.methods and sites == 1:
        parser.error("hierarchical uses sites as nodes: give --sites, 2 or more")
    evenly = sites * tree.nodes_per_switch
    if "hierarchical" in options.methods and any(size % evenly for size in options.ranks):
        parser.error(
            "hierarchical uses sites as nodes with equally many hosts: --ranks must be multiples "
            f"of {evenly}, --sites times --nodes-per-switch, got {options.ranks}"
        )
    try:
        found = simulated(options.methods, options.ranks, options.rates, tree, find_python())
        print("\n".join(table(found, options.ranks)))
        if options.plot:
            options.plot.write_text(picture(found, options.ranks), encoding="utf-8")
    except (ValueError, SimulationError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
