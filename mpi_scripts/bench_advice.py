"""Hold the line at a run's start against the run: what it says that compression saves, and saved.

sudo python mpi_scripts/bench_advice.py report/advice        30 emulated networks: 13 minutes
sudo python mpi_scripts/bench_advice.py report/edges --hosts 2 3 4 --rates 640mbit 320mbit \\
    160mbit 80mbit --densities 0.1 0.15 0.2 0.3 0.4 0.5      below which bandwidth it pays: 5

On every network a training of 500,000 parameters in ten tensors begins as any other does, with
`Compression.gtopk`: its links and rates are measured, and rank 0 says the line. Then steps by it
and dense ones take turns. Gradients are set, not computed: nothing hides the exchange. Writes
advice.json, a record for each network and density, and prints the table.

At high densities the bandwidth below which gTop-k pays is one that can be emulated. Where it saves
time at one of the rates and loses some at the next, it takes as long as dense in between: what it
saves is interpolated, linearly in the seconds of a byte, as both times are.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

# By path, Python would not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gtopk.torch as hvd
from gtopk.charts.units import bandwidth_text
from gtopk.plan.quantities import bandwidth
from mpi_scripts.bench_scaling import ROOT, environment
from mpi_scripts.predictions import Forecast, row

ELEMENTS: Final = 500_000
TENSORS: Final = 10
UNITS: Final = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}


class Held(NamedTuple):
    """One network. dense_seconds, gtopk_seconds: medians of steps on the slowest rank."""

    rate: str
    hosts: int
    entries: int  # that a rank selects
    line: str
    dense_seconds: float
    gtopk_seconds: float

    def forecasts(self) -> Iterator[Forecast]:
        """Yield what the line said, beside what was measured."""
        dense_seconds = said(self.line, "dense exchange is expected to take")
        yield self._of("dense's time", dense_seconds, self.dense_seconds)
        if "compression saves" in self.line:
            saved_seconds = said(self.line, "saves up to")
            yield self._of("what compression saves", saved_seconds, self.saved_seconds)

    def edge(self, bits_per_second: float) -> Iterator[Forecast]:
        """Yield where the line said that gTop-k ceases to pay, beside where it does.

        Its number, and of its bounds what is nearest: the very same if it lies between them.
        """
        about, lowest, highest = said_edge(self.line)
        yield self._of("below which bandwidth gTop-k pays", about, bits_per_second)
        nearest = min(max(bits_per_second, lowest), highest)
        yield self._of("between which bandwidths that is", nearest, bits_per_second)

    def _of(self, way: str, foretold: float, measured: float) -> Forecast:
        return Forecast(self.rate, self.hosts, ELEMENTS, self.entries, way, foretold, measured)

    @property
    def saved_seconds(self) -> float:
        """Return what gTop-k saved; less than nothing where dense is faster."""
        return self.dense_seconds - self.gtopk_seconds

    @property
    def seconds_per_byte(self) -> float:
        """Return those of the link."""
        return 8 / bandwidth(self.rate)


def said(line: str, words: str) -> float:
    """Return the number that a line tells after some words, in seconds or bits per second.

    Raises ValueError where it has none.
    """
    found = re.search(rf"{words}\s([\d.,]+)\s({'|'.join(UNITS)})(?!\w)", line)
    if found is None:
        raise ValueError(f"the line must tell a number after '{words}': {line}")
    return float(found[1].replace(",", "")) * UNITS[found[2]]


def said_edge(line: str) -> tuple[float, float, float]:
    """Return below how many bits per second gTop-k pays, as a line says, and its bounds.

    0: at no bandwidth. Raises ValueError where it does not say.
    """
    if "gTop-k pays at no bandwidth" in line:
        about = 0.0
    elif "gTop-k pays at every bandwidth" in line:
        about = math.inf
    else:
        about = said(line, "gTop-k pays below about")
    bracket = re.search(r"gTop-k pays [^(]*\((?!modelled)(.*?)\)", line)
    if bracket is None:
        return about, about, about
    if bracket[1] == "too close to tell":
        return about, 0.0, math.inf
    number = r"(none|any|[\d.]+)(?:\s(\S+))?"
    found = re.fullmatch(rf"{number} to {number} if a time is .*", bracket[1])
    if found is None:
        raise ValueError(f"the bracket must tell two bandwidths: {line}")
    low, low_unit, high, high_unit = found.groups()
    return about, _bound(low, low_unit or high_unit), _bound(high, high_unit)


def _bound(number: str, unit: str | None) -> float:
    if number in ("none", "any"):
        return 0.0 if number == "none" else math.inf
    return float(number) * UNITS[unit or "bit/s"]


def edges(held: Sequence[Held]) -> Iterator[tuple[float, list[Held]]]:
    """Yield below how many bits per second gTop-k pays, and who foretold it.

    Of each number of hosts and density; of none where that lies beyond the rates.
    """
    groups: dict[tuple[int, int], list[Held]] = {}
    for each in held:
        groups.setdefault((each.hosts, each.entries), []).append(each)
    for group in groups.values():
        slowest_first = sorted(group, key=lambda each: -each.seconds_per_byte)
        found = [crossing(*pair) for pair in itertools.pairwise(slowest_first)]
        measured = next((each for each in found if each is not None), None)
        if measured is not None:
            yield measured, group


def crossing(slow: Held, fast: Held) -> float | None:
    """Return at how many bits per second, between two rates, gTop-k takes as long as dense."""
    if slow.saved_seconds <= 0 or fast.saved_seconds > 0:
        return None
    share = slow.saved_seconds / (slow.saved_seconds - fast.saved_seconds)
    step = fast.seconds_per_byte - slow.seconds_per_byte
    return 8 / (slow.seconds_per_byte + share * step)


class _Line(logging.Handler):
    """Keeps what is logged about what compression saves."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "the dense exchange is expected to take" in record.getMessage():
            self.text = record.getMessage()


def rank(density: float, rounds: int) -> dict[str, object]:
    """Train on this rank; return what was said and what steps took, on every rank the same."""
    hvd.init()
    line = _Line()
    logging.getLogger("gtopk").addHandler(line)
    optimizers = []
    for compression in (hvd.Compression.gtopk(density), hvd.Compression.none):
        model = torch.nn.ParameterList(torch.zeros(ELEMENTS // TENSORS) for _ in range(TENSORS))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizers.append(hvd.DistributedOptimizer(sgd, model.named_parameters(), compression))
    generator = torch.Generator().manual_seed(hvd.rank())
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for optimizer, taken in zip(optimizers, seconds, strict=True):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            time.sleep(0.02)  # as a backward pass would: the links rest
            hvd.barrier()
            begun = time.perf_counter()
            optimizer.step()
            took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            slowest = float(hvd.allreduce(took, op=hvd.Max))
            if number:  # the first opens connections and measures links
                taken.append(slowest)
    logging.getLogger("gtopk").removeHandler(line)
    hvd.shutdown()
    gtopk_seconds, dense_seconds = map(statistics.median, seconds)
    return {"line": line.text, "dense_seconds": dense_seconds, "gtopk_seconds": gtopk_seconds}


def measured(rate: str, hosts: int, densities: Sequence[float], rounds: int) -> Iterator[Held]:
    """Emulate a network, train on it, and yield what was said and measured, by density."""
    command = [str(ROOT / "mpi_scripts" / "emulated_network.sh"), str(hosts), rate, "mpirun"]
    command += [sys.executable, __file__, "--rank", "--densities", *map(str, densities)]
    with tempfile.TemporaryDirectory() as cache:  # no link is known beforehand
        done = subprocess.run(
            [*command, "--rounds", str(rounds)],
            env={**environment(emulated=True), "GTOPK_ADVICE": "on", "XDG_CACHE_HOME": cache},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(answers) != len(densities):
        raise SystemExit(f"{rate}, {hosts} hosts: {done.stderr[-2000:]}")
    for density, answer in zip(densities, answers, strict=True):
        yield Held(rate, hosts, round(density * ELEMENTS), **json.loads(answer))


def table(held: Sequence[Held]) -> list[str]:
    """Return the rows in Markdown: how far off, in how many networks."""
    lines = ["| the line said | lines | median error | within 20 % | worst |", "|---" * 5 + "|"]
    forecasts = [forecast for each in held for forecast in each.forecasts()]
    for measured, group in edges(held):
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
    add("--densities", type=float, nargs="+", default=[0.05])
    add("--rounds", type=int, default=5)
    add("--rank", action="store_true", help=argparse.SUPPRESS)  # what each host runs
    options = parser.parse_args(arguments)
    if options.rank:
        torch.set_num_threads(1)
        for density in options.densities:
            found = rank(density, options.rounds)
            if found["line"]:  # this is rank 0
                print(json.dumps(found), flush=True)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    held = []
    for rate in options.rates:
        for hosts in options.hosts:
            for each in measured(rate, hosts, options.densities, options.rounds):
                held.append(each)
                print(f"{rate}, {hosts} hosts: {each.line}", file=sys.stderr, flush=True)
            (options.folder / "advice.json").write_text(
                json.dumps([each._asdict() for each in held], indent=1) + "\n", encoding="utf-8"
            )
    print("\n".join(table(held)))
    for bits_per_second, group in edges(held):
        print(
            f"{group[0].hosts} hosts, {group[0].entries:,} entries: gTop-k pays below "
            f"{bandwidth_text(bits_per_second)}; the lines said:"
        )
        for each in group:
            _, _, edge = each.line.partition("gTop-k pays ")
            print(f"    {edge.partition(' (modelled')[0]} ({each.rate})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
