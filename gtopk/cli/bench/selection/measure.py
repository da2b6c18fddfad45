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

The methods on a GPU, by its own clock; nothing where there is none.

Rivals are torch's operators. Ours work on CuPy's views of the same tensors, on the same stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from collectives import SparseVector, kernels
from collectives.kernels import device, host, reference, why_not_compiled
from collectives.vector import index_dtype

from ....exchange.buckets.arrays import current_stream, view_array
from .methods import COPY, FLOOR, TORCH_SELECTORS, Array, Ours, Place, Selector, Source, Timed

# What one call of a method leaves: positions and values, tensors or arrays of its device.
Picks = tuple[Any, Any]
Work = Callable[[], Picks]
# A way to make the work on (residual, gradient, k); both keep their memory from round to round.
Maker = Callable[[torch.Tensor, torch.Tensor, int], Work]


def why_no_gpu() -> str:
    """Return why nothing is measured on a GPU; "" where there is one."""
    if not torch.cuda.is_available():
        return "nothing on a GPU: torch sees none"
    try:
        device.cupy()
    except ImportError as error:
        return f"nothing on a GPU: {error}"
    return ""


def floor(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
    """Only add: the part that no method can avoid."""
    nothing = residual[:0], residual[:0]

    def work() -> Picks:
        residual.add_(gradient)
        return nothing

    return work


def copy(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
    """Only copy, which shows the memory's speed without computing."""
    nothing = residual[:0], residual[:0]

    def work() -> Picks:
        residual.copy_(gradient)
        return nothing

    return work


def by_torch(selector: Selector) -> Maker:
    """Return a function that accumulates, selects and clears by torch's operators."""

    def make(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
        def work() -> Picks:
            residual.add_(gradient)
            indices = selector(residual, k)
            values = residual[indices]
            residual[indices] = 0
            return indices, values

        return work

    return make


def ours(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> Work:
    """Our kernels, launched one by one; the host waits for the number of entries, and goes on."""
    return on_arrays(view_array(residual), view_array(gradient), k)


def on_arrays(residual: Array, gradient: Array, k: int) -> Work:
    """Our kernels on arrays: those of a GPU, or any."""
    step = Ours(kernels)

    def work() -> Picks:
        picked = step(residual, gradient, k)
        return picked.indices, picked.values

    return work


MAKERS: Final[dict[str, Maker]] = {
    FLOOR: floor,
    COPY: copy,
    "gtopk-cuda": ours,
    **{name: by_torch(selector) for name, selector in TORCH_SELECTORS.items()},
}


class Gpu:
    """A GPU; every method works on the same two tensors, on one stream of torch and the kernels.

    on_stream: makes that stream the current one.
    clock:     runs a work on it, and returns its seconds and what it gave.
    """

    def __init__(
        self,
        of: torch.device,
        device: str,
        on_stream: Callable[[], AbstractContextManager[None]],
        clock: Callable[[Work], tuple[float, Picks]],
        makers: Mapping[str, Maker] = MAKERS,
    ) -> None:
        self.device = device
        self.names = list(makers)
        self._of, self._on_stream, self._clock, self._makers = of, on_stream, clock, makers
        self._made: dict[str, Work] = {}
        self._shape = 0, 0

    def clock(self, method: str) -> str:
        return "gpu"

    def begin_round(self, residual: Array, gradient: Array, k: int) -> None:
        """Bring the arrays to the GPU; methods are made anew for another length or k."""
        with self._on_stream():
            if self._shape != (residual.size, k):
                self._shape = residual.size, k
                self._held, self._residual, self._gradient = (
                    torch.zeros(residual.size, device=self._of) for _ in range(3)
                )
                self._made = {
                    name: make(self._residual, self._gradient, k)
                    for name, make in self._makers.items()
                }
            self._held.copy_(torch.from_numpy(residual))
            self._gradient.copy_(torch.from_numpy(gradient))

    def time(self, method: str) -> Timed:
        """Run one method by the GPU's clock."""
        with self._on_stream():
            self._residual.copy_(self._held)
            seconds, picks = self._clock(self._made[method])
            return Timed(_on_host(*picks, self._residual.numel()), {"gpu": seconds})


def open_gpu() -> Gpu:
    of = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(of)):  # the default one cannot be captured
        on_stream = current_stream(of)
    return Gpu(of, torch.cuda.get_device_name(of), on_stream, seconds_of)


def seconds_of(work: Work) -> tuple[float, Picks]:
    """Return how long the current stream took for it, and what it gave.

    The copy before is still under way: that the host launches takes no time where it does not wait.
    """
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    picks = work()
    done.record()
    done.synchronize()
    return begun.elapsed_time(done) / 1e3, picks


def _on_host(indices: Any, values: Any, length: int) -> SparseVector:
    """Return picks with NumPy arrays."""

    def host(array: Any) -> Array:
        if isinstance(array, torch.Tensor):
            array = array.cpu().numpy()
        return array if isinstance(array, np.ndarray) else np.asarray(array.get())

    return SparseVector(host(indices).astype(index_dtype(length)), host(values), length)


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
    """Return the counts of each way to search on the same gradients."""
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
