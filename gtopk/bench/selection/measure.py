"""Time the methods in turn, round by round, on one residual that goes on as error feedback has it.

round    gradient g   residual e
         method 1:  copy of e, timed: += g, select, clear
         method 2:  copy of e, timed: ...                       every one is checked
         e += g, less the exact picks, which the network applies
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from collectives import SparseVector
from collectives.kernels import host, reference, why_not_compiled
from collectives.kernels.host import threads

from .gradients import Array, Source
from .methods import FLOOR, Method


class Spread(NamedTuple):
    """Median, lowest and highest over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Record(NamedTuple):
    """One method on one kind of data.

    clock:      "cpu" seconds of the one thread, or "wall" seconds where there are several.
    over_floor: time over that of `a += g` on the same clock, in the same round.
    exact:      whether it selected k entries, and no other was larger, in every round.
    selected:   how many entries it selected, the median.
    """

    method: str
    data: str
    n: int
    k: int
    density: float
    clock: str
    seconds: Spread
    over_floor: Spread
    exact: bool
    selected: int


def measure(
    source: Source,
    density: float,
    methods: Sequence[Method],
    rounds: int,
    warm_up: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Return a record for each method; the first of them must be the floor."""
    k = max(1, round(source.length * density))
    residual = np.zeros(source.length, np.float32)
    copy = np.empty_like(residual)
    threshold = 0.0
    cpu: dict[str, list[float]] = {method.name: [] for method in methods}
    wall: dict[str, list[float]] = {method.name: [] for method in methods}
    right: dict[str, list[bool]] = {method.name: [] for method in methods}
    selected: dict[str, list[int]] = {method.name: [] for method in methods}
    for number in range(warm_up + rounds):
        gradient = source.next_gradient()
        if number >= warm_up - 3:  # long enough before for thresholds to settle
            right_answer = Answer(residual + gradient, k)
            progress(f"{source.label}: round {number - warm_up + 1} of {rounds}")
            for method in methods:
                np.copyto(copy, residual)
                with threads.using(method.threads):
                    begun, began = time.thread_time(), time.perf_counter()
                    picked = method.step(copy, gradient, k)
                    seconds = time.thread_time() - begun, time.perf_counter() - began
                if number >= warm_up:
                    cpu[method.name].append(seconds[0])
                    wall[method.name].append(seconds[1])
                    selected[method.name].append(picked.entries)
                    right[method.name].append(right_answer.is_given_by(picked))
        picked, threshold = reference.accumulate_and_select(residual, gradient, k, threshold)
        reference.clear_at(residual, picked.indices)
        source.apply(picked)
    records = []
    for method in methods:
        times = cpu if method.threads == 1 else wall
        pairs = zip(times[method.name], times[FLOOR], strict=True)
        records.append(
            Record(
                method=method.name,
                data=source.label,
                n=source.length,
                k=k,
                density=density,
                clock="cpu" if method.threads == 1 else "wall",
                seconds=Spread.of(times[method.name]),
                over_floor=Spread.of([seconds / base for seconds, base in pairs]),
                exact=all(right[method.name]),
                selected=round(statistics.median(selected[method.name])),
            )
        )
    return records


class Answer:
    """The k largest magnitudes of a sum, whichever of equal ones."""

    def __init__(self, total: Array, k: int) -> None:
        self.k = k
        self.magnitudes = np.abs(total)
        self.at_k = np.partition(self.magnitudes, total.size - k)[total.size - k]

    def is_given_by(self, picked: SparseVector) -> bool:
        """Tell whether these are k entries of the sum, and no other is larger."""
        chosen = self.magnitudes[picked.indices]
        return (
            picked.entries == self.k == np.unique(picked.indices).size
            and bool((chosen >= self.at_k).all())
            and bool((chosen == np.abs(picked.values)).all())
        )


class MergeRecord(NamedTuple):
    """What makes one list of several: two are merged into their k largest, more are summed."""

    method: str
    lists: int
    k: int
    nanoseconds_per_input_entry: Spread


def measure_merges(k: int, rounds: int, most_lists: int = 8) -> list[MergeRecord]:
    """Time the merge of two selections of independent normal values at density 0.01, and a sum.

    Whose lists they are changes from round to round: a processor learns those that come again.
    """
    random = np.random.default_rng(0)
    picks = [
        reference.select(random.standard_normal(100 * k, np.float32), k)[0]
        for _ in range(most_lists)
    ]
    twins = {"gtopk-reference": reference} | (
        {} if why_not_compiled() else {"gtopk-compiled": host}
    )
    times: dict[tuple[str, int], list[float]] = {
        (name, lists): [] for lists in (2, most_lists) for name in twins
    }
    for number in range(3 + rounds):
        order = [picks[at] for at in random.permutation(most_lists)]
        for (name, lists), row in times.items():
            begun = time.thread_time()
            if lists == 2:
                twins[name].merge(*order[:2], k)
            else:
                twins[name].sum_by_index(order)
            if number >= 3:
                row.append(1e9 * (time.thread_time() - begun) / (lists * k))
    return [MergeRecord(*key, k, Spread.of(row)) for key, row in times.items()]
