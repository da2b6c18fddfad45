"""Time a step of error feedback with our kernels and with others, in turn.

python mpi_scripts/bench_selection.py --json selection.json

round    gradient g   residual e
         method 1:  copy of e, timed: += g, select, clear
         method 2:  copy of e, timed: ...                       every result is checked
         e += g, less the exact picks, which the network applies

Adverse cases are selections with a wrong guess or unusual values. Each has one residual, to which
zeros are added, and one guess at the threshold, with which every round starts. The result is still
right; the time is measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.cores import usable_cores, use_threads
from collectives.kernels import reference
from collectives.vector import Array
from gtopk.cli.arguments import Command, share, text_stream, whole_number, write_records
from gtopk.cli.bench.harness import add_words, bench_parser, one_of, show_progress, silent
from gtopk.cli.charts import aligned
from gtopk.runtime.machine import load, processor, this_machine
from mpi_scripts.selection_methods import (
    FLOOR,
    SOURCES,
    TWINS,
    Answer,
    Method,
    Ours,
    Range,
    Source,
    all_methods,
    floor,
    open_source,
    torch_topk,
)

ADVERSE: Final = "adverse"


class Record(NamedTuple):
    """One method on one kind of data.

    clock:      "cpu": seconds of the one thread; "wall": wall-clock seconds, if there are several.
    over_floor: time divided by that of `a += g` in the same round, by the same clock.
    exact:      whether, in every round, it selected k entries and no other was larger.
    selected:   how many entries it selected; the median.
    """

    method: str
    device: str
    torch: str
    data: str
    n: int
    k: int
    density: float
    clock: str
    seconds: Range
    over_floor: Range
    exact: bool
    selected: int


class Rounds:
    """The methods, the floor first, and their rounds' results."""

    def __init__(self, methods: Sequence[Method], words: Sequence[str] | None) -> None:
        """words: the names of the methods to run besides the floor; None: all."""
        self._methods = [m for m in methods if words is None or m.name in (FLOOR, *words)]
        self._taken: list[list[tuple[float, float, bool, int]]] = [[] for _ in self._methods]

    def run(self, residual: Array, gradient: Array, k: int, counts: bool) -> None:
        """Run every method once, on a copy of the residual."""
        answer, own = Answer(residual + gradient, k), np.empty_like(residual)
        floor = None
        for method, taken in zip(self._methods, self._taken, strict=True):
            np.copyto(own, residual)
            with use_threads(method.threads):
                # A single thread's CPU time excludes other programs; for several threads there is
                # only the wall clock.
                begun, began = time.thread_time(), time.perf_counter()
                picked = method.step(own, gradient, k)
                both = time.thread_time() - begun, time.perf_counter() - began
            # The floor is the first method.
            floor = floor or both
            if counts:
                clock = int(method.threads > 1)
                over = both[clock] / floor[clock]
                taken.append((both[clock], over, answer.is_given_by(picked), picked.entries))

    def records(self, data: str, length: int, k: int, density: float) -> list[Record]:
        """Return a record for each method."""
        found = []
        for method, taken in zip(self._methods, self._taken, strict=True):
            seconds, over_floor, right, selected = zip(*taken, strict=True)
            found.append(
                Record(
                    method=method.name,
                    device=processor(),
                    torch=torch.__version__,
                    data=data,
                    n=length,
                    k=k,
                    density=density,
                    clock="wall" if method.threads > 1 else "cpu",
                    seconds=Range.of(seconds),
                    over_floor=Range.of(over_floor),
                    exact=all(right),
                    selected=round(statistics.median(selected)),
                )
            )
        return found


def measure(
    source: Source,
    density: float,
    rows: Rounds,
    rounds: int,
    warm_up: int,
    progress: Callable[[str], None] = silent,
) -> list[Record]:
    """Return a record for each method on the gradients of a source."""
    k = max(1, round(source.length * density))
    residual = np.zeros(source.length, np.float32)
    threshold = 0.0
    for number in range(warm_up + rounds):
        gradient = source.next_gradient()
        # Some rounds before the first that counts, so that the methods' thresholds settle.
        if number >= warm_up - 3:
            progress(f"{source.label}: round {number - warm_up + 1} of {rounds}")
            rows.run(residual, gradient, k, counts=number >= warm_up)
        # The reference selects, so that all methods get the same residuals.
        picked, threshold = reference.accumulate_and_select(residual, gradient, k, threshold)
        reference.clear_at(residual, picked.indices)
        source.apply(picked)
    return rows.records(source.label, source.length, k, density)


def cases(length: int, k: int) -> Iterator[tuple[str, Array, float]]:
    """Yield each adverse case: its name, a residual, and a guess at its k-th largest |value|."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(length, np.float32)
    at_k = float(np.partition(np.abs(normal), length - k)[length - k])
    yield "normal values, guess 2 times too high", normal, 2 * at_k
    yield "normal values, guess 1e30", normal, 1e30
    yield "all equal, half of it for a guess", np.ones(length, np.float32), 0.5
    few = np.zeros(length, np.float32)
    few[random.choice(length, k // 2, replace=False)] = 1
    yield "fewer than k that are not zero", few, 0.5
    normal[random.random(length) < 0.1] = np.nan
    yield "10 % NaN", normal, at_k
    ascending = np.linspace(0, 1, length, dtype=np.float32)
    yield "ascending, half the guess", ascending, 0.5
    yield "ascending, no guess", ascending, 0.0


def measure_cases(
    length: int,
    density: float,
    words: Sequence[str] | None,
    rounds: int,
    progress: Callable[[str], None] = silent,
) -> Iterator[list[Record]]:
    """Time our twins and torch.topk, case by case."""
    k = max(2, round(length * density))
    # Write before zeroing: fresh zero pages all map to one page, which would be read for free.
    nothing = np.full(length, 1, np.float32)
    nothing[:] = 0
    for name, residual, guess in cases(length, k):
        ours = [Method(twin, Ours(TWINS[twin], guess)) for twin in sorted(TWINS)]
        rows = Rounds([Method(FLOOR, floor), *ours, Method("torch.topk", torch_topk)], words)
        for number in range(rounds + 2):
            progress(f"{name}: round {number - 1} of {rounds}")
            rows.run(residual, nothing, k, counts=number >= 2)
        yield rows.records(f"{name} (synthetic)", length, k, density)


class MergeRecord(NamedTuple):
    """A way to combine lists: two are merged into their k largest entries, more are summed."""

    method: str
    lists: int
    k: int
    nanoseconds_per_input_entry: Range


_LISTS: Final = 8  # lists to sum, as of eight ranks


def measure_merges(k: int, rounds: int) -> list[MergeRecord]:
    """Time the merge of two selections of independent normal values at density 0.01, and a sum.

    The lists change from round to round: a processor learns those that repeat.
    """
    random = np.random.default_rng(0)
    picks = [
        reference.select(random.standard_normal(100 * k, np.float32), k)[0] for _ in range(_LISTS)
    ]
    times: dict[tuple[str, int], list[float]] = {
        (name, lists): [] for lists in (2, _LISTS) for name in TWINS
    }
    for number in range(3 + rounds):
        order = [picks[at] for at in random.permutation(_LISTS)]
        for (name, lists), row in times.items():
            twin: Any = TWINS[name]
            begun = time.thread_time()
            if lists == 2:
                twin.merge(*order[:2], k)
            else:
                twin.sum_by_index(order)
            if number >= 3:
                row.append(1e9 * (time.thread_time() - begun) / (lists * k))
    return [MergeRecord(*key, k, Range.of(row)) for key, row in times.items()]


def parser() -> Command:
    """Return the command line's grammar."""
    described = bench_parser(
        "python mpi_scripts/bench_selection.py",
        "Time a step of error feedback (accumulate, select, clear) with our kernels and "
        "others, in turn in one run, and check what each of them selects.",
    )
    data = (*SOURCES, ADVERSE)
    add_words(
        described,
        "--elements",
        whole_number,
        [25_600_000],
        metavar="N",
        help="length of the gradient; default: 25600000",
    )
    described.option("--density", share, 0.001, "share of entries selected")
    which = f"gradients to select from: {', '.join(data)} (bad guesses, NaN, ties); default: all"
    add_words(described, "--data", one_of(data), data, help=which)
    add_words(described, "--methods", str, help="methods to time; default: all")
    described.option("--rounds", whole_number, 7, "timed rounds of each method")
    described.option("--warm-up", whole_number, 20, "untimed rounds before those")
    described.option(
        "--threads",
        whole_number,
        usable_cores(),
        "threads of the multi-threaded method; default: all cores",
    )
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    options = parser().parse_args(arguments)
    names = [method.name for method in all_methods(options.threads)]
    if unknown := set(options.methods or names) - set(names):
        parser().error(f"--methods must be among {', '.join(names)}; got {', '.join(unknown)}")
    torch.set_num_threads(1)
    machine, say = this_machine(), partial(print, file=text_stream(options.json), flush=True)
    say(", ".join(f"{name}: {value}" for name, value in machine.items()))
    say("times are medians of rounds, with the lowest and the highest of the ratios\n")
    records: list[Record] = []
    merges: list[MergeRecord] = []

    def take(found: list[Record]) -> None:
        show_progress()
        say(table(found))
        records.extend(found)

    for elements in options.elements:
        if ADVERSE in options.data:
            for found in measure_cases(
                elements, options.density, options.methods, options.rounds, show_progress
            ):
                take(found)
        for name in (name for name in options.data if name != ADVERSE):
            rows = Rounds(all_methods(options.threads), options.methods)
            source = open_source(name, elements)
            take(
                measure(
                    source, options.density, rows, options.rounds, options.warm_up, show_progress
                )
            )
        for merge in measure_merges(max(1, round(elements * options.density)), rounds=31):
            what = f"{'merge' if merge.lists == 2 else 'sum'} of {merge.lists} lists"
            spent = merge.nanoseconds_per_input_entry.text(1)
            say(f"{what} of {merge.k:,}, {merge.method}: {spent} ns per input entry")
            merges.append(merge)
        say()
    machine["load_after"] = load()
    write_records({"machine": machine, "records": records, "merges": merges}, options.json)
    return 0


def table(records: Sequence[Record]) -> str:
    """Return the records of one kind of data as lines."""
    first = records[0]
    rows = [("", "ms", "over a += g", "selected / k")]
    for record in records:
        picked = "exact" if record.exact else f"{record.selected / record.k:.3g}"
        rows.append(
            (
                record.method + (" [wall]" if record.clock == "wall" else ""),
                f"{1e3 * record.seconds.median:.2f}",
                record.over_floor.text(),
                "" if record.method == FLOOR else picked,
            )
        )
    lines = [
        f"{first.data}, n = {first.n:,}, k = {first.k:,} (density {first.density:g})",
        f"on {first.device}, by torch {first.torch}",
        *aligned(rows),
    ]
    by_name = {record.method: record.seconds.median for record in records}
    if topk := by_name.get("torch.topk"):
        for name in sorted(by_name.keys() & TWINS.keys()):
            lines.append(f"{name} is {topk / by_name[name]:.1f} times as fast as torch.topk")
    return "\n  ".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
