"""Measure what checksums on every message cost a dense sum: with and without, in turns.

mpirun -n 2 python mpi_scripts/bench_checked_messages.py
torchrun --nproc-per-node=2 mpi_scripts/bench_checked_messages.py

Prints a row for each length: the median wall-clock time of a round on the slowest rank, and a
rank's CPU time. The other cost of GTOPK_CHECK_MESSAGES=1 is in messages of a few kilobytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.transports import Transport, open_transport
from gtopk.runtime.launch import launched_by

LENGTHS = (250, 4_000, 32_000, 250_000, 2_000_000, 12_000_000)
COLUMNS = ("float32", "plain", "checked", "ratio", "CPU, plain", "CPU, checked", "ratio")


class Row(NamedTuple):
    """One length's median seconds, plain and checked."""

    length: int
    seconds: tuple[float, float]
    cpu_seconds: tuple[float, float]


def measure(pair: Sequence[Transport], lengths: Sequence[int], rounds: int) -> Iterator[Row]:
    """Yield a row for each length; pair: two transports of the same ranks, the second checked."""
    pair[1].check_messages()
    for length in lengths:
        array = np.ones(length, np.float32)
        times: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
        for number in range(-1, rounds):  # the first warms up
            for transport, (wall, cpu) in zip(pair, times, strict=True):
                array.fill(1)
                transport.barrier()
                begun, cpu_begun = time.perf_counter(), time.process_time()
                transport.allreduce(array)
                took = np.array([time.perf_counter() - begun, time.process_time() - cpu_begun])
                transport.allreduce(took, "max")
                if number >= 0:
                    wall.append(float(took[0]))
                    cpu.append(float(took[1]))
        plain, checked = times
        yield Row(
            length,
            (statistics.median(plain[0]), statistics.median(checked[0])),
            (statistics.median(plain[1]), statistics.median(checked[1])),
        )


def line(row: Row) -> str:
    """Return a row of the table, in milliseconds."""
    cells = [f"{4 * row.length / 1e3:,.0f} kB"]
    for plain, checked in (row.seconds, row.cpu_seconds):
        cells += [f"{1e3 * plain:.3g}", f"{1e3 * checked:.3g}", f"{checked / plain:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure on the launcher's ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    job = launched_by()
    if job is None:
        parser.error("start it with mpirun or torchrun")
    name = "torch.distributed" if job.launcher == "torchrun" else "mpi"
    if name == "torch.distributed":
        torch.distributed.init_process_group("gloo")  # for both transports
    pair = [open_transport(name), open_transport(name)]
    here = pair[0]
    if here.rank == 0:
        hosts = "a host" if len(here.neighbours()) == here.size else "hosts"
        print(f"{here.size} ranks on {hosts}, {here.library()}; milliseconds\n")
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for row in measure(pair, options.lengths, options.rounds):
        if here.rank == 0:
            print(line(row), flush=True)
    for transport in pair:
        transport.leave("the measurement is done")


if __name__ == "__main__":
    main()
