"""Throughput: the seconds of every rank's last batches, and the next sizes that follow from them.

The policies are pure functions: the same measurements give the same sizes, so every rank computes
them on its own.

Goodput: the training progress a second, throughput times efficiency; the global batch with the
best goodput is chosen.

Pollux (Qiao et al. 2021, OSDI, arXiv 2008.12260, section 3), with M samples in a step:

    throughput    M / (compute(M) + exchange)        compute(M): until all ranks have ended, which
                                                     they do together (`equal_finish`)
    efficiency    (noise + M0) / (noise + M)         of a sample; it is 1 in the reference batch M0

    goodput |     .-----.          more samples a step hide the exchange but teach less and less,
            |   .'       '--.      and even less if the noise is small; with
            |  '             '     compute(M) = a + c M, best is M = sqrt(noise (a + exchange) / c)
            +------------------- M

Pollux has one batch size for all replicas; here each rank has its own share of M.

GradientTimer: measures a rank's seconds from a batch's hand-over to its last gradient.

fetch        hand-over                    last gradient      step: select, exchange, apply
---------------|------ forward, backward -------|---------------------------------------------
  waited       |           computed             |   measured by the optimizer's report

SpeedModel: a batch of b samples takes a + c b seconds on a rank.
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch

from ..exchange.buckets.arrays import Timestamp
from ..exchange.buckets.parameters import trained_by
from ..telemetry.step_report import StepReport
from .partitioning.cuts import Limits


class Timer(Protocol):
    """Measures the seconds of batches; simulations use a model of them."""

    def start(self, samples: int) -> None:
        """Start measuring: the script gets the batch now."""

    def elapsed_seconds(self) -> float | None:
        """Return the seconds from the hand-over to the last gradient; None if none came."""

    def exchanged(self, step: StepReport) -> float:
        """Return the seconds that this rank waited for a step's exchange, and for other ranks."""


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a bound method as long as its object lives.

    A distributed optimizer shares its hooks with the plain one, which outlives it. The hook stays
    registered when its object is gone: that may happen while a step iterates over its hooks.
    """
    method_ref = weakref.WeakMethod(method)

    def hook(*step: Any) -> None:
        if (call := method_ref()) is not None:
            call(*step)

    return hook


class GradientTimer:
    """Times batches: `start` at the hand-over, `elapsed_seconds` after the last gradient.

    On a GPU it records events on the stream, and reads them long after the batch. With several
    GPUs it uses the device of the first parameter on a GPU.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._watched: set[torch.Tensor] = set()
        self._device = torch.device("cpu")
        self._began: Timestamp | None = None
        self._ended: Timestamp | None = None
        self._watch()

    def start(self, samples: int) -> None:
        """Start measuring."""
        self._watch()
        self._began, self._ended = Timestamp(self._device), None

    def _watch(self) -> None:
        """Add hooks to all parameters trained now: layers may be thawed, and groups added."""
        # Weak: the parameter keeps its hooks, which must not keep the timer of a deleted loader.
        stop = weak_hook(self._stop)
        for parameter in trained_by(self._optimizer):
            if parameter not in self._watched:
                self._watched.add(parameter)
                if parameter.is_cuda and self._device.type == "cpu":
                    self._device = parameter.device
                parameter.register_post_accumulate_grad_hook(stop)

    def _stop(self, parameter: torch.Tensor) -> None:
        self._ended = Timestamp(self._device)

    def elapsed_seconds(self) -> float | None:
        """Return the seconds from the hand-over to the last gradient; None if none came."""
        began, ended = self._began, self._ended
        self._began = self._ended = None
        return None if began is None or ended is None else began.seconds_until(ended)

    def exchanged(self, step: StepReport) -> float:
        """Return the seconds of the exchange that backward did not hide."""
        return step.synchronize_seconds


WINDOW_DECAY: Final = 0.5  # the weight of a window relative to the next one
KEPT_WINDOWS: Final = 4  # windows
LEAST_VARIATION: Final = 0.05  # fit sizes only if they differ by more than this share of their mean
SPEED_CHANGE: Final = 0.3  # share by which seconds deviate from the model if the speed has changed
LEAST_SLOPE: Final = 0.25  # of seconds / b: noise must not make samples look free


class Cost(NamedTuple):
    """Seconds of a batch: `fixed` + `per_sample` times its size."""

    fixed: float
    per_sample: float

    def seconds(self, size: float) -> float:
        """Return the seconds of a batch of this size."""
        return self.fixed + self.per_sample * size


class SpeedModel:
    """The cost of one rank's batches, fitted to windows of (size, seconds).

    Call `observe` for each window, then read `cost`. Old windows weigh less.
    """

    def __init__(self) -> None:
        self._windows: list[tuple[int, float]] = []

    @property
    def cost(self) -> Cost:
        """Return the affine fit if the size varied, and a proportional cost otherwise.

        Raises ValueError before the first observation.
        """
        if not self._windows:
            raise ValueError("a speed model needs an observation first")
        size, seconds = self._windows[-1]
        # A single size cannot separate the fixed cost from the cost of the samples.
        return fit(self._windows) or Cost(0.0, seconds / size)

    @property
    def has_data(self) -> bool:
        """Tell whether anything was observed."""
        return bool(self._windows)

    def has_measured(self, size: int, within: float) -> bool:
        """Tell whether the last observed batch had this size, within a share of it."""
        return any(abs(size - last) <= within * last for last, _ in self._windows[-1:])

    def observe(self, size: int, seconds: float) -> bool:
        """Take a window's size and median seconds; return whether the rank's speed has changed.

        It has changed if the seconds are far from the model; then all earlier windows are
        forgotten. A batch without samples is ignored.
        """
        if size <= 0:
            return False
        changed = self._deviates(size, seconds)
        if changed:
            # All of them: a fit over both speeds would be right for neither.
            self._windows.clear()
        self._windows.append((size, seconds))
        del self._windows[:-KEPT_WINDOWS]
        return changed

    def _deviates(self, size: int, seconds: float) -> bool:
        if not self._windows:
            return False
        cost = fit(self._windows)
        if cost is None:
            last, before = self._windows[-1]
            if abs(size - last) > LEAST_VARIATION * last:
                return False  # a proportional cost may be this wrong at another size
            cost = Cost(0.0, before / last)
        expected = cost.seconds(size)
        return abs(seconds - expected) > SPEED_CHANGE * expected

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [list(pair) for pair in self._windows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load another model's windows."""
        self._windows = [(int(size), float(seconds)) for size, seconds in state["seen"]]


def summarise(seconds: Sequence[float]) -> float:
    """Return the median of a window, or of its second half if the rank's speed changed within it.

    The lower median is one of the values, never the mean of one before and one after a change.
    """
    half = len(seconds) // 2
    # Not the mean, which a few steps delayed by the system would move.
    median = statistics.median_low(seconds)
    if half < 2:
        return median
    before, after = statistics.median_low(seconds[:half]), statistics.median_low(seconds[half:])
    return after if abs(after - before) > SPEED_CHANGE * before else median


def fit(windows: Sequence[tuple[int, float]]) -> Cost | None:
    """Return the weighted least-squares line through (size, seconds); later ones weigh more.

    Neither coefficient is negative. Returns None if the sizes do not vary enough.
    """
    sizes = [size for size, _ in windows]
    if len(windows) < 2 or max(sizes) - min(sizes) <= LEAST_VARIATION * sum(sizes) / len(sizes):
        return None
    # The speed may drift: a window counts half as much as the one after it.
    newest = len(windows) - 1
    weighted = [(WINDOW_DECAY ** (newest - i), b, t) for i, (b, t) in enumerate(windows)]
    total = sum(w for w, _, _ in weighted)
    mean_size = sum(w * b for w, b, _ in weighted) / total
    mean_seconds = sum(w * t for w, _, t in weighted) / total
    covariance = sum(w * (b - mean_size) * (t - mean_seconds) for w, b, t in weighted)
    slope = covariance / sum(w * (b - mean_size) ** 2 for w, b, _ in weighted)
    proportional = mean_seconds / mean_size
    # At most `proportional`: above it the fixed part would be negative.
    slope = min(max(slope, LEAST_SLOPE * proportional), proportional)
    return Cost(mean_seconds - slope * mean_size, slope)


def equal_finish(costs: Sequence[Cost], limits: Limits) -> list[int]:
    """Return the sizes with which the slowest rank ends its batch soonest.

    Bisection finds the time at which all ranks end together, except those at a bound. Sizes are
    rounded down to grains; the last grains go, one by one, to the rank that would end first.

        seconds   level T  - - - - - - - - -   a_i + c_i b_i = T,  sum of b_i = total
                  |  c1 b1 |  c2 b2  | c3 b3
                  |________|   a2    |  a3     with b_i cut off at its bounds
    """
    limits.check()
    low, high, grain = limits.lowest(), limits.highest(), limits.grain
    exact = _water_fill(costs, limits)
    # Never too many: `_water_fill` stays below the total, so grains are only added.
    sizes = [max(math.floor(size / grain) * grain, a) for size, a in zip(exact, low, strict=True)]
    for _ in range((limits.total - sum(sizes)) // grain):
        open_ranks = [rank for rank, size in enumerate(sizes) if size + grain <= high[rank]]
        first = min(open_ranks, key=lambda rank: costs[rank].seconds(sizes[rank] + grain))
        sizes[first] += grain
    return sizes


def _water_fill(costs: Sequence[Cost], limits: Limits) -> list[float]:
    """Return the sizes for the latest common end at which their sum is still below the total."""
    low, high = limits.lowest(), limits.highest()

    def at(level: float) -> list[float]:
        return [
            min(max((level - cost.fixed) / cost.per_sample, a), b)
            for cost, a, b in zip(costs, low, high, strict=True)
        ]

    # Bisection: bounds make the sum of the sizes monotonic in the level, but not smooth.
    below, above = 0.0, max(cost.seconds(b) for cost, b in zip(costs, high, strict=True))
    while above - below > 1e-15 * above:
        middle = (below + above) / 2
        # Between neighbouring floats the middle is one of them, and the loop would never end.
        if middle in (below, above):
            break
        if math.fsum(at(middle)) < limits.total:
            below = middle
        else:
            above = middle
    # From below: `equal_finish` only adds what is missing.
    return at(below)


def spread_of(seconds: Sequence[float]) -> float:
    """Return (max - min) / mean of the ranks that had samples."""
    busy = [each for each in seconds if each > 0]
    if len(busy) < 2:
        return 0.0
    return (max(busy) - min(busy)) * len(busy) / math.fsum(busy)


LEAST_GAIN: Final = 0.05  # more => fewer changes, further from the best
MOST_CHANGE: Final = 2.0  # largest factor between one global batch and the next


@dataclass(frozen=True)
class Measurements:
    """The measurements from which a global batch is chosen; equal on all ranks.

    costs:            the ranks' speed models.
    exchange_seconds: how long a step waits for its exchange.
    noise_scale:      the gradient noise scale; see `noise_scale`.
    reference:        the batch M0, in which a sample has efficiency 1.
    """

    costs: Sequence[Cost]
    exchange_seconds: float
    noise_scale: float
    reference: int


def efficiency(total: int, noise_scale: float, reference: int) -> float:
    """Return the efficiency of a sample in a batch of `total`; it is 1 in the reference batch."""
    # The limit; computed, it would be infinity / infinity, which is NaN.
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + reference) / (noise_scale + total)


def goodput(measured: Measurements, limits: Limits) -> float:
    """Return the progress a second with batches of limits.total, in samples of the reference."""
    # Real sizes: the shortest time in which all ranks can end the batch.
    sizes = zip(measured.costs, _water_fill(measured.costs, limits), strict=True)
    seconds = max(cost.seconds(size) for cost, size in sizes) + measured.exchange_seconds
    total = limits.total
    return total / seconds * efficiency(total, measured.noise_scale, measured.reference)


def best_total(measured: Measurements, limits_of: Callable[[int], Limits], totals: range) -> int:
    """Return the total with the highest goodput; the smaller of two equal ones.

    limits_of: maps a global batch to its limits. Bisection works because goodput rises, then falls:
    1/goodput ~ (1 + noise/M) seconds(M), and seconds(M) is convex.
    """
    low, high = 0, len(totals) - 1
    while low < high:
        middle = (low + high) // 2
        here, above = (limits_of(total) for total in totals[middle : middle + 2])
        if goodput(measured, above) > goodput(measured, here):
            low = middle + 1
        else:
            high = middle
    return totals[low]


def next_total(
    measured: Measurements, limits_of: Callable[[int], Limits], totals: range, current: int
) -> int:
    """Return the next global batch: `current`, unless another one has LEAST_GAIN more goodput.

    It changes by at most a factor MOST_CHANGE: measurements say less about more distant batches.
    """
    first = math.ceil((current / MOST_CHANGE - totals.start) / totals.step)
    last = math.floor((current * MOST_CHANGE - totals.start) / totals.step)
    near = totals[max(first, 0) : max(last + 1, 0)]
    if not near:
        return current
    best = best_total(measured, limits_of, near)
    gain = goodput(measured, limits_of(best)) / goodput(measured, limits_of(current)) - 1
    return best if gain >= LEAST_GAIN else current
