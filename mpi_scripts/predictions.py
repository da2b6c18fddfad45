"""Hold what was foretold of reductions against the clock: tables of the errors.

Of the time that each takes, and of what it saves of dense's, as the line at a run's start says.

python mpi_scripts/predictions.py FOLDER/*.json     files of `gtopk bench collectives --json`,
                                                    named RATE-HOSTS.json
python mpi_scripts/predictions.py --simulate ...    what SimGrid makes of every message, in place of
                                                    the model's rounds; codes are the model's
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# By path, Python would find no gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.cost import Link
from collectives.planning import EXACT, Format, Network
from gtopk.bench.collectives.command import read
from gtopk.bench.collectives.record import Record, Results
from gtopk.replay.platform import Platform
from gtopk.replay.simulate import find_python, simulate
from gtopk.replay.traces import Reduction, Trace, trace_of

DENSE: Final = "gtopk's own dense"


class Forecast(NamedTuple):
    """One way to reduce, on one network: seconds, or what `way` says.

    error: (foretold - measured) / measured.
    """

    rate: str
    ranks: int
    length: int
    entries: int
    way: str
    foretold: float
    measured: float

    @property
    def error(self) -> float:
        """Return how far off it was, of what was measured."""
        return self.foretold / self.measured - 1


def forecasts(
    name: str, results: Results, wire_seconds: Callable[[Record], float | None]
) -> Iterable[Forecast]:
    """Yield every record that has a model; wire_seconds: what it says of a record's messages."""
    for record in results["records"]:
        wire, code = wire_seconds(record), record["modelled_code_seconds"]
        if record["ours"] and wire is not None:
            foretold = wire + (code or 0.0)
            measured = record["seconds"]["median"]
            network = name, record["ranks"], record["length"]
            entries = record["length"] if record["label"] == DENSE else record["k"]
            yield Forecast(*network, entries, record["label"], foretold, measured)


def savings(found: Sequence[Forecast]) -> Iterator[Forecast]:
    """Yield what each sparse way saves of the time that dense, which is slower, takes there."""
    dense = {each[:3]: each for each in found if each.way == DENSE}
    for each in found:
        whole = dense.get(each[:3])
        if whole and each.way != DENSE:
            yield each._replace(
                foretold=whole.foretold - each.foretold,
                measured=whole.measured - each.measured,
            )


def modelled(record: Record) -> float | None:
    """Return what the model of rounds said before the benchmark ran."""
    return record["modelled_wire_seconds"]


def simulated(python: str) -> Callable[[Record], float | None]:
    """Return what replays a record's messages on the link that its ranks measured."""
    traces: dict[Reduction, Trace] = {}  # the same messages at any bandwidth

    def wire_seconds(record: Record) -> float | None:
        if record["modelled_wire_seconds"] is None or record["algorithm"] is None:
            return None
        is_dense = record["algorithm"] == "dense"
        indices, _, values = (record["format"] or "+".join(EXACT)).partition("+")
        reduction = Reduction(
            record["algorithm"],
            record["ranks"],
            record["length"],
            record["length"] if is_dense else record["k"],
            format=Format(indices, values),
        )
        trace = traces.get(reduction) or traces.setdefault(reduction, trace_of(reduction))
        network = Network(record["ranks"], Link(*record["modelled_link"]))
        return simulate(trace, Platform(network), python)

    return wire_seconds


def row(way: str, found: Sequence[Forecast]) -> str:
    """Return a row of the table: how many, the errors, and the worst."""
    sizes = sorted(abs(each.error) for each in found)
    within = sum(size <= 0.2 for size in sizes)
    worst = max(found, key=lambda each: abs(each.error))
    return (
        f"| {way} | {len(found)} | {100 * statistics.median(sizes):.0f} % | {within} "
        f"| {100 * worst.error:+.0f} % ({worst.rate}, {worst.ranks} ranks) |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--simulate", action="store_true", help="by SimGrid, message by message")
    options = parser.parse_args(arguments)
    wire_seconds = simulated(find_python()) if options.simulate else modelled
    files = [(path.stem.partition("-")[0], read(path)) for path in options.files]
    found = [each for file in files for each in forecasts(*file, wire_seconds)]
    saved = list(savings(found))
    for entries in sorted({each.entries for each in found}):
        for title, forecast in (("time", found), ("saved of dense's time", saved)):
            here = [each for each in forecast if each.entries == entries]
            if here:
                print(f"{entries:,} entries a rank: {title}\n")
                print(*table(here), "", sep="\n")
    return 0


def table(found: Sequence[Forecast]) -> Iterator[str]:
    """Yield the lines of a table, a row for each way to reduce."""
    yield "| | networks | median error | within 20 % | worst |"
    yield "|---|---|---|---|---|"
    for way in dict.fromkeys(each.way for each in found):
        yield row(way, [each for each in found if each.way == way])
    within = sum(abs(each.error) <= 0.2 for each in found)
    yield f"| all | {len(found)} | | {within} | |"


if __name__ == "__main__":
    sys.exit(main())
