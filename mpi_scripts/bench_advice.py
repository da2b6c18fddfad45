"""Hold the line at a run's start against the run: what it says that compression saves, and saved.

sudo python mpi_scripts/bench_advice.py report/advice        30 emulated networks: about 8 minutes

On every network a training of 500,000 parameters in ten tensors begins as any other does, with
`Compression.gtopk`: its links and rates are measured, and rank 0 says the line. Then steps by it
and dense ones take turns. Gradients are set, not computed: nothing hides the exchange. Writes
advice.json, one record for each network, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import logging
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
from mpi_scripts.bench_scaling import ROOT, environment
from mpi_scripts.predictions import Forecast, row

ELEMENTS: Final = 500_000
TENSORS: Final = 10
UNITS: Final = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


class Held(NamedTuple):
    """One network. dense_seconds, gtopk_seconds: medians of steps on the slowest rank."""

    rate: str
    hosts: int
    entries: int  # that a rank selects
    line: str
    said_dense_seconds: float
    said_saved_seconds: float
    dense_seconds: float
    gtopk_seconds: float

    def forecasts(self) -> Iterator[Forecast]:
        """Yield what the line said, beside what was measured."""
        where = self.rate, self.hosts, ELEMENTS, self.entries
        saved_seconds = self.dense_seconds - self.gtopk_seconds
        yield Forecast(*where, "dense's time", self.said_dense_seconds, self.dense_seconds)
        yield Forecast(*where, "what compression saves", self.said_saved_seconds, saved_seconds)


def said(line: str, words: str) -> float:
    """Return the seconds that a line tells after some words; raise ValueError where it has none."""
    found = re.search(rf"{words} ([\d.,]+)\s(s|ms|µs)\b", line)
    if found is None:
        raise ValueError(f"the line must tell a time after '{words}': {line}")
    return float(found[1].replace(",", "")) * UNITS[found[2]]


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
    torch.set_num_threads(1)
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
    gtopk_seconds, dense_seconds = map(statistics.median, seconds)
    return {"line": line.text, "dense_seconds": dense_seconds, "gtopk_seconds": gtopk_seconds}


def measured(rate: str, hosts: int, density: float, rounds: int) -> Held:
    """Emulate a network, train on it, and return what was said and measured."""
    command = [str(ROOT / "mpi_scripts" / "emulated_network.sh"), str(hosts), rate, "mpirun"]
    command += [sys.executable, __file__, "--rank", "--density", f"{density:g}"]
    with tempfile.TemporaryDirectory() as cache:  # no link is known beforehand
        done = subprocess.run(
            [*command, "--rounds", str(rounds)],
            env={**environment(emulated=True), "GTOPK_ADVICE": "on", "XDG_CACHE_HOME": cache},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        raise SystemExit(f"{rate}, {hosts} hosts: {done.stderr[-2000:]}")
    found = json.loads(answers[-1])
    line = found["line"]
    dense, saved = said(line, "dense exchange is expected to take"), said(line, "saves up to")
    seconds = found["dense_seconds"], found["gtopk_seconds"]
    return Held(rate, hosts, round(density * ELEMENTS), line, dense, saved, *seconds)


def table(held: Sequence[Held]) -> list[str]:
    """Return the rows in Markdown: how far off, in how many networks."""
    lines = ["| the line said | networks | median error | within 20 % | worst |", "|---" * 5 + "|"]
    pairs = zip(*(each.forecasts() for each in held), strict=True)
    return lines + [row(forecasts[0].way, forecasts) for forecasts in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every network, write, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path("report/advice"), help="to write into")
    add("--rates", nargs="+", default=["5mbit", "10mbit", "20mbit", "40mbit", "80mbit", "160mbit"])
    add("--hosts", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    add("--density", type=float, default=0.05)
    add("--rounds", type=int, default=5)
    add("--rank", action="store_true", help=argparse.SUPPRESS)  # what each host runs
    options = parser.parse_args(arguments)
    if options.rank:
        found = rank(options.density, options.rounds)
        if hvd.rank() == 0:
            print(json.dumps(found), flush=True)
        hvd.shutdown()
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    held = []
    for rate in options.rates:
        for hosts in options.hosts:
            held.append(measured(rate, hosts, options.density, options.rounds))
            print(f"{rate}, {hosts} hosts: {held[-1].line}", file=sys.stderr, flush=True)
            (options.folder / "advice.json").write_text(
                json.dumps([each._asdict() for each in held], indent=1) + "\n", encoding="utf-8"
            )
    print("\n".join(table(held)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
