"""Time the methods in turns on one residual, which error feedback carries from round to round.

round    gradient g   residual e
         method 1:  copy of e, timed: += g, select, clear
         method 2:  copy of e, timed: ...                       every one is checked
         ...        on a GPU, too, where there is one: the same e and g
         e += g, less the exact picks, which the network applies

It also counts how often a search reads the residual twice, over many steps. A search is guided by a
threshold from the step before. Where that hid some of the k largest, or let far too many through,
the residual is read again: right all the same, but late. Steps go on as in training, with error
feedback, and at shares of them something changes:

    0 %           5 %      10 %        40 %          55 %          70 %        80 %
    k * 64   k * 16   k * 4   k        rate / 10     k * 4         k           rate / 10
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from collectives import SparseVector
from collectives.kernels import host, reference, why_not_compiled

from .methods import Array, Place, Source


class Spread(NamedTuple):
    """Median, lowest and highest over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Record(NamedTuple):
    """One method on one kind of data, on one device.

    clock:      "cpu" seconds of the one thread, "wall" seconds where there are several, or "gpu".
    over_floor: time over that of `a += g` on the same device and clock, in the same round.
    exact:      whether it selected k entries, and no other was larger, in every round.
    selected:   how many entries it selected, the median.
    """

    method: str
    device: str
    torch: str
    data: str
    n: int
    k: int
    density: float
    clock: str
    seconds: Spread
    over_floor: Spread
    exact: bool
    selected: int


class _Row(NamedTuple):
    """One method's rounds."""

    seconds: list[float]
    over_floor: list[float]
    right: list[bool]
    selected: list[int]


Rows = dict[tuple[Place, str], _Row]


def measure(
    source: Source,
    density: float,
    places: Mapping[Place, Sequence[str]],
    rounds: int,
    warm_up: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Return a record for each method of each place; the first of a place must be its floor."""
    k = max(1, round(source.length * density))
    residual = np.zeros(source.length, np.float32)
    threshold = 0.0
    rows = rows_of(places)
    for number in range(warm_up + rounds):
        gradient = source.next_gradient()
        if number >= warm_up - 3:  # long enough before for thresholds to settle
            progress(f"{source.label}: round {number - warm_up + 1} of {rounds}")
            run_round(rows, residual, gradient, k, note=number >= warm_up)
        picked, threshold = reference.accumulate_and_select(residual, gradient, k, threshold)
        reference.clear_at(residual, picked.indices)
        source.apply(picked)
    return records_of(rows, source.label, source.length, k, density)


def rows_of(places: Mapping[Place, Sequence[str]]) -> Rows:
    """Return an empty row for each method of each place."""
    return {
        (place, name): _Row([], [], [], []) for place, names in places.items() for name in names
    }


def run_round(rows: Rows, residual: Array, gradient: Array, k: int, note: bool) -> None:
    """Run every method once; what it takes, over its place's first, and gives, is noted."""
    right_answer = Answer(residual + gradient, k)
    floors: dict[Place, dict[str, float]] = {}
    for (place, name), row in rows.items():
        if place not in floors:
            place.begin_round(residual, gradient, k)
        timed = place.time(name)
        floor = floors.setdefault(place, timed.seconds)
        if note:
            clock = place.clock(name)
            row.seconds.append(timed.seconds[clock])
            row.over_floor.append(timed.seconds[clock] / floor[clock])
            row.right.append(right_answer.is_given_by(timed.picked))
            row.selected.append(timed.picked.entries)


def records_of(rows: Rows, data: str, length: int, k: int, density: float) -> list[Record]:
    return [
        Record(
            method=name,
            device=place.device,
            torch=torch.__version__,
            data=data,
            n=length,
            k=k,
            density=density,
            clock=place.clock(name),
            seconds=Spread.of(row.seconds),
            over_floor=Spread.of(row.over_floor),
            exact=all(row.right),
            selected=round(statistics.median(row.selected)),
        )
        for (place, name), row in rows.items()
    ]


class Answer:
    """The k largest magnitudes of a sum, whichever of equal ones; NaN counts as the largest."""

    def __init__(self, total: Array, k: int) -> None:
        self.k = k
        self.keys = reference.keys(total)
        self.at_k = np.partition(self.keys, total.size - k)[total.size - k]
        # Zeros may be selected or not.
        self.least = k if self.at_k else int(np.count_nonzero(self.keys))

    def is_given_by(self, picked: SparseVector) -> bool:
        """Tell whether these are k entries of the sum, but for zeros, and no other is larger."""
        chosen = self.keys[picked.indices]
        return (
            np.unique(picked.indices).size == picked.entries <= self.k
            and int(np.count_nonzero(chosen)) == self.least
            and bool((chosen >= self.at_k).all())
            and bool((chosen == reference.keys(picked.values)).all())
        )


class MergeRecord(NamedTuple):
    """A way to make one list of several: two are merged into their k largest, more are summed."""

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


# At which share of the steps: what the density is multiplied by from then on.
DENSITIES: Final = {0.0: 64.0, 0.025: 16.0, 0.05: 4.0, 0.1: 1.0, 0.55: 4.0, 0.7: 1.0}
MOST_DENSE: Final = 0.25
# And at which the learning rate is divided by 10.
DROPS: Final = (0.4, 0.8)

# (residual, gradient, k, threshold) -> picks, the next threshold, how often the residual was read.
Search = Callable[[Array, Array, int, float], tuple[SparseVector, float, int]]


class Rescans(NamedTuple):
    """One method over all steps.

    rescans:    the steps after the first that read the residual more than once.
    at_changes: those of them in which the density or the learning rate had just changed.
    exact:      whether every step selected k entries, and no other was larger.
    """

    method: str
    data: str
    n: int
    density: float
    steps: int
    density_changes: int
    rate_drops: int
    rescans: int
    at_changes: int
    exact: bool

    @property
    def share(self) -> float:
        """Return the share of the steps that read the residual again."""
        return self.rescans / self.steps


class _Twin:
    """One method with its own residual, and what it counted."""

    def __init__(self, search: Search, length: int) -> None:
        self.search = search
        self.residual = np.zeros(length, np.float32)
        self.threshold = 0.0
        self.rescans = self.at_changes = 0
        self.exact = True


def searches() -> dict[str, Search]:
    """Return the ways to search that are here, by the names of their methods."""
    found: dict[str, Search] = {"gtopk-reference": reference.search}
    if not why_not_compiled():
        found["gtopk-compiled"] = _compiled
    return found


def _compiled(
    residual: Array, gradient: Array, k: int, threshold: float
) -> tuple[SparseVector, float, int]:
    from collectives.kernels.host import selection

    picked, report = selection.search(residual, gradient, k, threshold)
    return picked, report.next_threshold, report.scans


def count_rescans(
    source: Source,
    density: float,
    steps: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Rescans]:
    """Return how each way to search fares on the same gradients."""
    twins = {name: _Twin(search, source.length) for name, search in searches().items()}
    densities = {int(share * steps): factor for share, factor in DENSITIES.items()}
    drops = {int(share * steps) for share in DROPS}
    k = 0
    for step in range(steps):
        changed = step in densities or step in drops
        if step in densities:
            k = max(1, round(source.length * min(MOST_DENSE, density * densities[step])))
        if step in drops:
            source.slow_down(0.1)
        if step % 10 == 0:
            progress(f"{source.label}: step {step} of {steps}")
        gradient = source.next_gradient()
        for twin in twins.values():
            answer = Answer(twin.residual + gradient, k)
            picked, twin.threshold, scans = twin.search(twin.residual, gradient, k, twin.threshold)
            twin.exact &= answer.is_given_by(picked)
            if step and scans > 1:
                twin.rescans += 1
                twin.at_changes += changed
            reference.clear_at(twin.residual, picked.indices)
        source.apply(picked)
    return [
        Rescans(
            method=name,
            data=source.label,
            n=source.length,
            density=density,
            steps=steps,
            density_changes=len(densities) - 1,
            rate_drops=len(drops),
            rescans=twin.rescans,
            at_changes=twin.at_changes,
            exact=twin.exact,
        )
        for name, twin in twins.items()
    ]
