"""Compare the line at a run's start, on what compression saves, with what it really saves.

sudo python mpi_scripts/bench_advice.py report/advice        30 emulated networks: 15 minutes
sudo python mpi_scripts/bench_advice.py report/edges --hosts 2 3 4 --rates 640mbit 320mbit \\
    160mbit 80mbit --densities 0.1 0.15 0.2 0.3 0.4 0.5      break-even bandwidths: 5 minutes

On every network a training of 500,000 parameters in ten tensors starts as usual, with
`Compression.gtopk`: ranks measure their links and rates, and rank 0 logs the line. Then compressed
and dense steps take turns. Gradients are set, not computed, so that nothing hides the exchange.
Writes advice.json, with a record for each network and density, and prints the table.

The bandwidth below which compression pays is within reach of emulation at high densities, or where
links are long (--delays) and the algorithm takes more rounds than dense (--algorithm oktopk with
--tensors 1, as dense takes its rounds for each bucket). If compression saves time at one rate and
loses time at the next, that bandwidth lies between the two. It is interpolated linearly in the
seconds per byte, in which both times are linear.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd
from gtopk.units import bandwidth, bandwidth_text
from mpi_scripts.bench_scaling import ROOT, environment
from mpi_scripts.predictions import Forecast, row

COMPRESSIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "gtopk": hvd.Compression.gtopk,
    "oktopk": hvd.Compression.oktopk,
}
NO_DELAY: Final = "0"
UNITS: Final = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
# The line's words for edges without a bandwidth, and what `parse_edge` returns for them.
_EDGES_WITHOUT_NUMBER: Final = {
    "at no bandwidth or at every one": (None, 0.0, math.inf),
    "at no bandwidth": (0.0, 0.0, 0.0),
    "at every bandwidth": (math.inf, math.inf, math.inf),
}


class Measurement(NamedTuple):
    """One network's line and times.

    dense_seconds, sparse_seconds: medians over the steps of the ranks' mean.
    delay: one way between two hosts, without the machine's own time to forward a packet.
    """

    rate: str
    delay: str
    hosts: int
    elements: int
    entries: int  # that a rank selects
    line: str
    dense_seconds: float
    sparse_seconds: float

    def forecasts(self) -> Iterator[Forecast]:
        """Yield the line's predictions with the measured values."""
        dense_seconds = number_after(": dense", self.line)
        yield self._of("dense's time", dense_seconds, self.dense_seconds)
        if ": saves up to" in self.line:
            saved_seconds = number_after("saves up to", self.line)
            yield self._of("what compression saves", saved_seconds, self.saved_seconds)

    def edge(self, bits_per_second: float) -> Iterator[Forecast]:
        """Yield the bandwidth above which compression does not pay, predicted and measured.

        The first prediction is the line's number, if it has one. The second is the measured value
        clipped to the line's bounds, so that a value within them counts as exact.
        """
        about, lowest, highest = parse_edge(self.line)
        if about is not None:
            yield self._of("below which bandwidth it pays", about, bits_per_second)
        nearest = min(max(bits_per_second, lowest), highest)
        yield self._of("between which bandwidths that is", nearest, bits_per_second)

    def _of(self, way: str, predicted: float, measured: float) -> Forecast:
        shape = self.hosts, self.elements, self.entries
        return Forecast(self.network, *shape, way, predicted, measured)

    @property
    def network(self) -> str:
        """Return a description of the links."""
        return self.rate if self.delay == NO_DELAY else f"{self.rate}, {self.delay}"

    @property
    def saved_seconds(self) -> float:
        """Return the seconds that compression saved; negative if dense is faster."""
        return self.dense_seconds - self.sparse_seconds

    @property
    def seconds_per_byte(self) -> float:
        """Return the link's seconds per byte."""
        return 8 / bandwidth(self.rate)


def number_after(words: str, line: str) -> float:
    """Return the number after some words in a line, in seconds or bits per second.

    Raises ValueError if there is none.
    """
    found = re.search(rf"{words}\s([\d.,]+)\s({'|'.join(UNITS)})(?!\w)", line)
    if found is None:
        raise ValueError(f"the line must have a number after '{words}': {line}")
    return float(found[1].replace(",", "")) * UNITS[found[2]]


def edge_text(line: str) -> str:
    """Return the line's text on where compression pays: "below about 48 Mbit/s (25 to ...)"."""
    _, _, edge = line.rpartition(" pays ")
    return edge.partition("; links ")[0]


def parse_edge(line: str) -> tuple[float | None, float, float]:
    """Return the bits per second below which compression pays, from a line, and the two bounds.

    None: the line has only the bounds. 0: at no bandwidth. Raises ValueError for a line without it.
    """
    edge = edge_text(line)
    for words, parsed in _EDGES_WITHOUT_NUMBER.items():
        if edge.startswith(words):
            return parsed
    for words, other in ("at most", 0.0), ("at least", math.inf):
        if re.match(rf"below\s[\d.]+\s\S+ {words}, perhaps", edge):
            bound = number_after("below", edge)
            return None, min(bound, other), max(bound, other)
    found = re.fullmatch(
        r"below (?:about\s\S+\s\S+ \(|a bandwidth of )"
        r"([\d.]+)(?:\s(\S+))? to ([\d.]+)\s(\w+/s)\W.*",
        edge,
    )
    if found is None:
        raise ValueError(f"the line must say where compression pays: {line}")
    low, low_unit, high, unit = found.groups()
    about = number_after("below about", edge) if "about" in edge else None
    return about, float(low) * UNITS[low_unit or unit], float(high) * UNITS[unit]


def edges(measurements: Sequence[Measurement]) -> Iterator[tuple[float, list[Measurement]]]:
    """Yield the bits per second below which compression pays, and the runs whose lines predict it.

    There is one for each delay, number of hosts and density, unless it is outside the measured
    rates.
    """
    groups: dict[tuple[str, int, int], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.delay, each.hosts, each.entries), []).append(each)
    for group in groups.values():
        slowest_first = sorted(group, key=lambda each: -each.seconds_per_byte)
        found = [crossing(*pair) for pair in itertools.pairwise(slowest_first)]
        measured = next((each for each in found if each is not None), None)
        if measured is not None:
            yield measured, group


def crossing(slow: Measurement, fast: Measurement) -> float | None:
    """Return the bits per second, between two rates, at which both take the same time."""
    if slow.saved_seconds <= 0 or fast.saved_seconds > 0:
        return None
    share = slow.saved_seconds / (slow.saved_seconds - fast.saved_seconds)
    step = fast.seconds_per_byte - slow.seconds_per_byte
    return 8 / (slow.seconds_per_byte + share * step)


class _Line(logging.Handler):
    """Keeps the log message about the time that compression saves."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("estimated exchange per step"):
            self.text = record.getMessage()


def rank(options: argparse.Namespace, density: float) -> dict[str, object]:
    """Train on this rank; return the line and the steps' times, the same on every rank."""
    hvd.init()
    line = _Line()
    logging.getLogger("gtopk").addHandler(line)
    logging.getLogger("gtopk").setLevel(logging.DEBUG)  # the line's details are logged there
    optimizers = []
    shape = options.elements // options.tensors
    for compression in (COMPRESSIONS[options.algorithm](density), hvd.Compression.none):
        model = torch.nn.ParameterList(torch.zeros(shape) for _ in range(options.tensors))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizers.append(hvd.DistributedOptimizer(sgd, model.named_parameters(), compression))
    generator = torch.Generator().manual_seed(hvd.rank())
    seconds: list[list[float]] = [[], []]
    for number in range(options.rounds + 1):
        for optimizer, taken in zip(optimizers, seconds, strict=True):
            parameters = optimizer.param_groups[0]["params"]
            both = [
                [torch.randn(each.shape, generator=generator) for each in parameters]
                for _ in range(2)
            ]
            hvd.barrier()
            took = torch.zeros(1, dtype=torch.float64)
            # Two steps, as ranks leave a barrier up to a link's latency apart: a rank that is early
            # waits in this step and is late in the next.
            for gradients in both:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                time.sleep(0.02)  # the links rest, as during a backward pass
                begun = time.perf_counter()
                optimizer.step()
                took += (time.perf_counter() - begun) / 2
            ranks_mean = float(hvd.allreduce(took))
            if number:  # the first opens connections and measures links
                taken.append(ranks_mean)
    logging.getLogger("gtopk").removeHandler(line)
    hvd.shutdown()
    sparse_seconds, dense_seconds = map(statistics.median, seconds)
    return {"line": line.text, "dense_seconds": dense_seconds, "sparse_seconds": sparse_seconds}


def measured(
    options: argparse.Namespace, rate: str, delay: str, hosts: int
) -> Iterator[Measurement]:
    """Emulate a network, train on it, and yield the predictions and measurements, by density."""
    network = [str(hosts), rate] if delay == NO_DELAY else ["--delay", delay, str(hosts), rate]
    program = [sys.executable, __file__, "--rank", "--densities", *map(str, options.densities)]
    program += ["--algorithm", options.algorithm, "--elements", str(options.elements)]
    program += ["--tensors", str(options.tensors), "--rounds", str(options.rounds)]
    with tempfile.TemporaryDirectory() as cache:  # an empty cache, so that links are measured
        done = subprocess.run(
            [str(ROOT / "mpi_scripts" / "emulated_network.sh"), *network, "mpirun", *program],
            env={**environment(emulated=True), "GTOPK_ADVICE": "on", "XDG_CACHE_HOME": cache},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(answers) != len(options.densities):
        raise SystemExit(f"{' '.join(network)}: {done.stderr[-2000:]}")
    for density, answer in zip(options.densities, answers, strict=True):
        entries = round(density * options.elements)
        yield Measurement(rate, delay, hosts, options.elements, entries, **json.loads(answer))


def table(measurements: Sequence[Measurement]) -> list[str]:
    """Return the rows in Markdown: the errors, and the number of networks."""
    lines = ["| the line said | lines | median error | within 20 % | worst |", "|---" * 5 + "|"]
    forecasts = [forecast for each in measurements for forecast in each.forecasts()]
    for measured, group in edges(measurements):
        forecasts += [forecast for each in group for forecast in each.edge(measured)]
    for way in dict.fromkeys(forecast.way for forecast in forecasts):
        lines.append(row(way, [forecast for forecast in forecasts if forecast.way == way]))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every network, write, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path("report/advice"), help="to write into")
    add("--rates", nargs="+", default=["5mbit", "10mbit", "20mbit", "40mbit", "80mbit", "160mbit"])
    add("--hosts", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    add("--delays", nargs="+", default=[NO_DELAY], help="10ms, say: one way, on top")
    add("--densities", type=float, nargs="+", default=[0.05])
    add("--algorithm", choices=COMPRESSIONS, default="gtopk")
    add("--elements", type=int, default=500_000)
    add("--tensors", type=int, default=10, help="of as many elements each")
    add("--rounds", type=int, default=5, help="of two steps each")
    add("--rank", action="store_true", help=argparse.SUPPRESS)  # what each host runs
    options = parser.parse_args(arguments)
    if options.rank:
        torch.set_num_threads(1)
        for density in options.densities:
            found = rank(options, density)
            if found["line"]:  # this is rank 0
                print(json.dumps(found), flush=True)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    measurements = []
    for rate, delay, hosts in itertools.product(options.rates, options.delays, options.hosts):
        for each in measured(options, rate, delay, hosts):
            measurements.append(each)
            print(f"{each.network}, {hosts} hosts: {each.line}", file=sys.stderr, flush=True)
        (options.folder / "advice.json").write_text(
            json.dumps([each._asdict() for each in measurements], indent=1) + "\n", encoding="utf-8"
        )
    print("\n".join(table(measurements)))
    for bits_per_second, group in edges(measurements):
        first = group[0]
        delayed = "" if first.delay == NO_DELAY else f", {first.delay}"
        print(
            f"{first.hosts} hosts{delayed}, {first.entries:,} entries: {options.algorithm} pays "
            f"below {bandwidth_text(bits_per_second)}; the lines predicted:"
        )
        for each in group:
            print(f"    {edge_text(each.line)} ({each.rate})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
