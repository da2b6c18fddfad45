"""Compare predicted and measured times of reductions, in tables of the errors.

One table is for the time of each reduction, one for the time that it saves compared with dense (as
the line at a run's start predicts it), and one for all times, by how busy the cores were that all
emulated hosts shared: above a half, these cores limit the speed instead of the links.

python mpi_scripts/predictions.py FOLDER/*.json     files of `gtopk bench collectives --json`,
                                                    named RATE-HOSTS.json
python mpi_scripts/predictions.py --simulate ...    predict with SimGrid, from every message and
                                                    the computation between them, instead of
                                                    the model's rounds
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.algorithms import ALGORITHMS
from collectives.cost import Link
from collectives.cost_model import EXACT, Format, Network
from collectives.errors import CollectiveError
from collectives.wire.format import check as check_format
from gtopk.cli.bench.collectives.cases import SCHEMA, Record, Results
from mpi_scripts.replay.simulate import Platform, SimulationError, find_python, simulate
from mpi_scripts.replay.traces import Profile, Reduction, Trace, profile_of, trace_of

DENSE: Final = "gtopk's own dense"
BUSY: Final = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, math.inf))


def read(path: Path) -> Results:
    """Return the results in a JSON file; raise an OSError or ValueError that names it."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return checked(results, str(path))


def checked(results: Any, source: str) -> Results:
    """Return the results read from a file; raise ValueError for another program's file."""
    if not isinstance(results, dict) or results.get("benchmark") != "collectives":
        raise ValueError(f"{source} must be written by `gtopk bench collectives --json`")
    if results.get("schema") != SCHEMA:
        raise ValueError(
            f"{source} must have schema {SCHEMA}, got {results.get('schema')!r}: run it again"
        )
    if not isinstance(results.get("records"), list) or not isinstance(results.get("run"), dict):
        raise ValueError(f"{source} lacks its records or its description of the run")
    for record in results["records"]:
        if not isinstance(record, dict):
            raise ValueError(f"a record of {source} must be an object, got {record!r}")
        if lacking := Record.__required_keys__ - record.keys():
            raise ValueError(f"a record of {source} lacks {', '.join(sorted(lacking))}")
    return cast("Results", results)


class Forecast(NamedTuple):
    """A prediction for one reduction on one network: seconds, or the quantity named by `way`.

    busy:  the share of the shared cores' time that the ranks' processes took; None: unknown.
    error: (predicted - measured) / measured.
    """

    rate: str
    ranks: int
    length: int
    entries: int
    way: str
    predicted: float
    measured: float
    busy: float | None = None

    @property
    def error(self) -> float:
        """Return the relative error; infinity where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else math.inf


def forecasts(
    name: str, results: Results, predict: Callable[[Record], float | None]
) -> Iterable[Forecast]:
    """Yield a forecast for every record that has a model; predict: returns a record's seconds."""
    for record in results["records"]:
        predicted = predict(record)
        if record["ours"] and predicted is not None:
            measured = record["seconds"]["median"]
            network = name, record["ranks"], record["length"]
            entries = record["length"] if record["label"] == DENSE else record["k"]
            busy = busyness(record, results["run"].get("shared_cores"))
            yield Forecast(*network, entries, record["label"], predicted, measured, busy)


def check(results: Results, source: str) -> None:
    """Raise ValueError if a record has figures that no benchmark writes."""
    cores = results["run"].get("shared_cores")
    if not (cores is None or (isinstance(cores, int) and cores > 0)):
        raise ValueError(f"shared_cores of {source} must be a number of cores, got {cores!r}")
    for number, record in enumerate(results["records"]):
        try:
            is_sound = _is_sound(record)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise ValueError(
                f"record {number} of {source} must have the counts and times of a measurement; "
                "run the benchmark again"
            )


def _is_sound(record: Record) -> bool:
    """Tell whether a record's counts and times are possible; on malformed ones it may raise."""
    counts = record["ranks"], record["k"], record["length"]
    latency_seconds, seconds_per_byte, burst_bytes = record["modelled_link"]
    times = [
        *(latency_seconds, seconds_per_byte, burst_bytes),
        *(record["seconds"]["median"], record["cpu_seconds"]["mean"], *record["seconds_by_round"]),
        *(record["modelled_wire_seconds"] or 0.0, record["modelled_code_seconds"] or 0.0),
    ]
    if record["algorithm"] in ALGORITHMS:  # shards have a format of their own
        check_format(format_of(record))
    return (
        all(type(count) is int for count in counts)
        and min(counts) >= 1
        and record["k"] <= record["length"]
        and isinstance(record["label"], str)
        and all(math.isfinite(each) and each >= 0.0 for each in times)
        and record["seconds_by_round"][-1] > 0.0
    )


def format_of(record: Record) -> Format:
    """Return a record's wire format; the exact one if it names none."""
    indices, _, values = (record["format"] or "+".join(EXACT)).partition("+")
    return Format(indices, values)


def busyness(record: Record, cores: int | None) -> float | None:
    """Return the share of the shared cores' time that the processes took in the last round."""
    if cores is None:
        return None
    took_seconds = record["ranks"] * record["cpu_seconds"]["mean"]
    return took_seconds / (cores * record["seconds_by_round"][-1])


def savings(found: Sequence[Forecast]) -> Iterator[Forecast]:
    """Yield the time that each sparse method saves compared with dense on the same network."""
    dense = {each[:3]: each for each in found if each.way == DENSE}
    for each in found:
        baseline = dense.get(each[:3])
        if baseline and each.way != DENSE:
            yield each._replace(
                predicted=baseline.predicted - each.predicted,
                measured=baseline.measured - each.measured,
            )


def modelled(record: Record) -> float | None:
    """Return the seconds that the model of rounds predicted before the benchmark ran."""
    wire = record["modelled_wire_seconds"]
    return None if wire is None else wire + (record["modelled_code_seconds"] or 0.0)


def simulated(python: str) -> Callable[[Record], float | None]:
    """Return a function that replays a record's messages on the link that its ranks measured.

    Between messages ranks compute: as long in total as the model says, distributed between the
    messages as measured on this machine.
    """
    traces: dict[Reduction, Trace] = {}  # the same messages at any bandwidth
    profiles: dict[Reduction, Profile] = {}

    def seconds(record: Record) -> float | None:
        if record["modelled_wire_seconds"] is None or record["algorithm"] not in ALGORITHMS:
            return None  # shards, for example, do not reduce picks
        is_dense = record["algorithm"] == "dense"
        reduction = Reduction(
            record["algorithm"],
            record["ranks"],
            record["length"],
            record["length"] if is_dense else record["k"],
            format=format_of(record),
        )
        trace = traces.get(reduction) or traces.setdefault(reduction, trace_of(reduction))
        network = Network(record["ranks"], Link(*record["modelled_link"]))
        code = record["modelled_code_seconds"] or 0.0
        if is_dense:
            return simulate(trace, Platform(network), python) + code
        profile = profiles.get(reduction) or profiles.setdefault(reduction, profile_of(reduction))
        share = code / max(map(sum, profile))
        computing = [[share * seconds for seconds in rank] for rank in profile]
        return simulate(trace, Platform(network), python, computing)

    return seconds


def by_busyness(found: Sequence[Forecast]) -> Iterator[str]:
    """Yield the lines of a table with a row for each range of how busy the cores were."""
    yield "| cores busy | forecasts | median error | within 20 % | worst |"
    yield "|---|---|---|---|---|"
    for least, end in BUSY:
        within = [each for each in found if each.busy is not None and least <= each.busy < end]
        if within:
            step = f"from {100 * least:.0f} %" + (f" to {100 * end:.0f} %" if end < 1 else "")
            yield row(step, within)


def row(way: str, found: Sequence[Forecast]) -> str:
    """Return a row of the table: the number of forecasts, their errors, and the worst."""
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
    parser.add_argument(
        "--simulate", action="store_true", help="predict with SimGrid, message by message"
    )
    options = parser.parse_args(arguments)
    try:
        predict = simulated(find_python()) if options.simulate else modelled
        files = [(path, read(path)) for path in options.files]
        for path, results in files:
            check(results, str(path))
        by_file = [
            [*forecasts(path.stem.partition("-")[0], results, predict)] for path, results in files
        ]
    except (OSError, ValueError, CollectiveError, SimulationError) as error:
        parser.error(str(error))
    found = [each for forecast in by_file for each in forecast]
    # Compare each file with its own dense: files of two runs may have the same name.
    saved = [each for forecast in by_file for each in savings(forecast)]
    for entries in sorted({each.entries for each in found}):
        for title, forecast in (("time", found), ("saved of dense's time", saved)):
            of_size = [each for each in forecast if each.entries == entries]
            if of_size:
                print(f"{entries:,} entries a rank: {title}\n")
                print(*table(of_size), "", sep="\n")
    if any(each.busy is not None for each in found):
        print("all times, by how busy the shared cores were\n")
        print(*by_busyness(found), "", sep="\n")
    return 0


def table(found: Sequence[Forecast]) -> Iterator[str]:
    """Yield the lines of a table with a row for each method."""
    yield "| | networks | median error | within 20 % | worst |"
    yield "|---|---|---|---|---|"
    for way in dict.fromkeys(each.way for each in found):
        yield row(way, [each for each in found if each.way == way])
    within = sum(abs(each.error) <= 0.2 for each in found)
    yield f"| all | {len(found)} | | {within} | |"


if __name__ == "__main__":
    sys.exit(main())
