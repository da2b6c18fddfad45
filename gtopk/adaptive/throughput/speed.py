"""Speed: the seconds that a rank computes on a batch, measured and modelled.

They are measured from the batch's hand-over to its last gradient:

fetch        hand-over                    last gradient      step: select, exchange, apply
---------------|------ forward, backward -------|---------------------------------------------
  waited       |           computed             |   the optimizer's report tells these

SpeedModel: a batch of b samples takes a + c b seconds on a rank.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from ...exchange.buckets.moment import Moment
from ...exchange.buckets.parameters import trained_by
from ...telemetry.step_report import StepReport


class Timer(Protocol):
    """Tells what the batches took; a modelled one takes its place in simulations."""

    def hand_over(self, samples: int) -> None:
        """Begin: the batch is the script's from now on."""

    def take(self) -> float | None:
        """Return the seconds from the hand-over to the last gradient; None where none came."""

    def exchanged(self, step: StepReport) -> float:
        """Return what this rank waited for the exchange of a step, for other ranks included."""


class GradientTimer:
    """Stops at every gradient; the last one before `take` is the batch's last.

    On a GPU by what its stream has come to, which is asked when the batch is long over; of several,
    by that of the first parameter there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._watched: set[torch.Tensor] = set()
        self._device = torch.device("cpu")
        self._began: Moment | None = None
        self._ended: Moment | None = None
        self._watch()

    def hand_over(self, samples: int) -> None:
        """Begin."""
        self._watch()
        self._began, self._ended = Moment(self._device), None

    def _watch(self) -> None:
        """Listen to all that is trained by now: layers are thawed, and groups added."""
        stop = weakref.WeakMethod(self._stop)

        def hook(parameter: torch.Tensor) -> None:
            if (still_there := stop()) is not None:
                still_there()

        for parameter in trained_by(self._optimizer):
            if parameter not in self._watched:
                self._watched.add(parameter)
                if parameter.is_cuda and self._device.type == "cpu":
                    self._device = parameter.device
                parameter.register_post_accumulate_grad_hook(hook)

    def _stop(self) -> None:
        self._ended = Moment(self._device)

    def take(self) -> float | None:
        """Return the seconds from the hand-over to the last gradient; None where none came."""
        began, ended = self._began, self._ended
        self._began = self._ended = None
        return None if began is None or ended is None else began.seconds_until(ended)

    def exchanged(self, step: StepReport) -> float:
        """Return what backward did not hide."""
        return step.synchronize_seconds


FORGETTING: Final = 0.5  # the weight of a window against the one after it
REMEMBERED: Final = 4  # windows
VARIED: Final = 0.05  # sizes that differ by more than this share of their mean can be fitted
REGIME: Final = 0.3  # a rank this far from its model has become another
LEAST_SLOPE: Final = 0.25  # of seconds / b: noise must not make samples look free


class Cost(NamedTuple):
    """Seconds of a batch: `fixed` + `per_sample` times its size."""

    fixed: float
    per_sample: float

    def seconds(self, size: float) -> float:
        """Return what a batch of this size takes."""
        return self.fixed + self.per_sample * size


class SpeedModel:
    """The cost of one rank's batches, fitted to windows of (size, seconds); old ones fade."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float]] = []

    @property
    def cost(self) -> Cost:
        """Return the affine fit where the size varied, and proportional cost otherwise.

        Raises ValueError before the first observation.
        """
        if not self._seen:
            raise ValueError("a speed model needs an observation first")
        size, seconds = self._seen[-1]
        return fit(self._seen) or Cost(0.0, seconds / size)

    @property
    def known(self) -> bool:
        """Tell whether anything was observed."""
        return bool(self._seen)

    def knows(self, size: int, within: float) -> bool:
        """Tell whether the last batch that was observed had this size, within a share of it."""
        return bool(self._seen) and abs(size - self._seen[-1][0]) <= within * self._seen[-1][0]

    def observe(self, size: int, seconds: float) -> bool:
        """Take a window's size and median seconds; return whether the rank has changed its regime.

        It has, where it is far from what is known: then everything before is forgotten. A batch of
        no samples says nothing.
        """
        if size <= 0:
            return False
        changed = self._is_foreign(size, seconds)
        if changed:
            self._seen.clear()
        self._seen.append((size, seconds))
        del self._seen[:-REMEMBERED]
        return changed

    def _is_foreign(self, size: int, seconds: float) -> bool:
        if not self._seen:
            return False
        cost = fit(self._seen)
        if cost is None:
            last, before = self._seen[-1]
            if abs(size - last) > VARIED * last:
                return False  # proportional cost may be as far off as this
            cost = Cost(0.0, before / last)
        expected = cost.seconds(size)
        return abs(seconds - expected) > REGIME * expected

    def state_dict(self) -> dict[str, Any]:
        """Return what is known."""
        return {"seen": [list(pair) for pair in self._seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know what another model knew."""
        self._seen = [(int(size), float(seconds)) for size, seconds in state["seen"]]


def summarise(seconds: Sequence[float]) -> float:
    """Return the median of a window; of its second half, where a rank became another within it.

    The lower median is one of the values: no mean of what was before a change and after it.
    """
    half = len(seconds) // 2
    median = statistics.median_low(seconds)
    if half < 2:
        return median
    before, after = statistics.median_low(seconds[:half]), statistics.median_low(seconds[half:])
    return after if abs(after - before) > REGIME * before else median


def fit(seen: Sequence[tuple[int, float]]) -> Cost | None:
    """Return the weighted least-squares line through (size, seconds), the last one counting most.

    Neither part is negative. None where the sizes do not vary enough.
    """
    sizes = [size for size, _ in seen]
    if len(seen) < 2 or max(sizes) - min(sizes) <= VARIED * sum(sizes) / len(sizes):
        return None
    weights = [FORGETTING ** (len(seen) - 1 - place) for place in range(len(seen))]
    total = sum(weights)
    mean_size = sum(w * b for w, (b, _) in zip(weights, seen, strict=True)) / total
    mean_seconds = sum(w * t for w, (_, t) in zip(weights, seen, strict=True)) / total
    above = sum(
        w * (b - mean_size) * (t - mean_seconds) for w, (b, t) in zip(weights, seen, strict=True)
    )
    slope = above / sum(w * (b - mean_size) ** 2 for w, (b, _) in zip(weights, seen, strict=True))
    proportional = mean_seconds / mean_size
    slope = min(max(slope, LEAST_SLOPE * proportional), proportional)
    return Cost(mean_seconds - slope * mean_size, slope)
