"""Controller: decides when sizes change, and by how much; every rank runs the same state machine.

    WARMUP --> MEASURE --spread up to 0.05, or little to gain--> HOLD
                ^   |
                |   +---up to 0.30: FINE, a tenth of a size-----> SETTLE --+
                |   +---above: SOLVE----------------------------> SETTLE --+
                +----------------------------------------------------------+

        Two windows with a spread of 0.10 or more end HOLD, and so does one above 0.30. After SOLVE
        only FINE is allowed for two windows, unless a rank's speed has changed. One window is too
        noisy to show a spread of a few per cent, so 16 windows of HOLD are averaged and may move
        sizes once more. HOLD also cuts a size that does not fit into a rank's memory.

        All three bounds are raised on a noisy machine. A spread of less than half a millisecond
        counts as zero: it is noise of the operating system.

spread: (max - min) / mean of the ranks' median seconds per batch. Every rank gets the same records
in the same order and computes the same sizes, so no coordinator is needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .partitioning.cuts import Limits, round_sizes
from .throughput import Cost, SpeedModel, equal_finish, spread_of

WARMUP_STEPS: Final = 5
SETTLING_STEPS: Final = 2  # after the prefetched steps
# Two bounds, to enter HOLD and to leave it: with a single bound, a spread close to it would enter
# and leave HOLD all the time.
HOLD_SPREAD: Final = 0.05
LEAVE_HOLD_SPREAD: Final = 0.10
SOLVE_SPREAD: Final = 0.30
FINE_SHARE: Final = 0.10
LEAST_SECONDS: Final = 5e-4  # a smaller spread is noise of the operating system
# The spread of equal ranks is usually below this many times the noise of one rank's windows.
NOISE_IN_SPREAD: Final = 2.0
NOISE_WINDOWS: Final = 4
LEAST_GAIN: Final = 0.02
FINE_WINDOWS: Final = 2
# The mean of 16 windows has a quarter of one window's error, so half the gain is worth a change.
HELD_WINDOWS: Final = 16
LEAST_GAIN_HELD: Final = 0.01

_MOST_SAMPLES: Final = 1 << 40  # of a rank in a step; more than any memory holds


class Window(NamedTuple):
    """One rank's window: its size, its median seconds, the most samples that fit into memory."""

    size: int
    seconds: float
    max_samples: int


class Controller:
    """Decides the sizes of the ranks' batches, window by window.

    Count a step in the window if `counts(step)`; when `is_due(step)`, call `decide` on every rank
    with the windows of all ranks.

    sizes: the sizes decided last.
    measuring_from: the first step that counts in the open window.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        limits: Limits,
        interval: int = 20,
    ) -> None:
        limits.check()
        self.sizes = list(sizes)
        self.limits = limits
        self.interval = interval
        self.measuring_from = WARMUP_STEPS
        self._models = [SpeedModel() for _ in sizes]
        self._holding = False
        self._uneven_windows = 0
        self._hold_windows: list[list[float]] = []  # seconds, since sizes last changed
        self._fine_left = 0
        self._last_moves = [0] * len(sizes)
        self._damping = [1.0] * len(sizes)
        self._prediction_errors: list[list[float]] = []  # of each rank, in the last windows

    def counts(self, step: int) -> bool:
        """Tell whether the time of this step counts in the window."""
        return step >= self.measuring_from

    def is_due(self, step: int) -> bool:
        """Tell whether the window is full after this many steps."""
        return step >= self.measuring_from + self.interval

    def decide(self, windows: Sequence[Window], step: int, effective_step: int) -> list[int]:
        """Return the sizes from step `effective_step` on, given every rank's window.

        step: the number of finished steps.
        """
        before = self.sizes
        self.sizes = self._choose(windows)
        changed = self.sizes != before
        self.measuring_from = effective_step + SETTLING_STEPS if changed else step
        return self.sizes

    def _choose(self, windows: Sequence[Window]) -> list[int]:
        current = [window.size for window in windows]
        seconds = [window.seconds if window.size else 0.0 for window in windows]
        # Before the models learn these seconds, which they would then predict too well.
        self._record_errors(current, seconds)
        changed = [
            model.observe(size, each)
            for model, size, each in zip(self._models, current, seconds, strict=True)
        ]
        # A rank whose speed has changed may need a large move at once.
        if any(changed):
            self._fine_left = 0
        spread = spread_of(seconds)
        limits = self._limits(windows)
        busy = [each for each in seconds if each]
        if max(busy) - min(busy) < LEAST_SECONDS:
            spread = 0.0
        if self._update_holding(spread):
            return self._refined(current, seconds, limits)
        self._hold_windows.clear()
        costs = self.costs()
        ideal = equal_finish(costs, limits)
        if spread > self._raised_by_noise(SOLVE_SPREAD) and not self._fine_left:
            self._fine_left = FINE_WINDOWS
            # The sizes jump, so earlier moves and their damping no longer apply.
            self._last_moves = [0] * len(current)
            self._damping = [1.0] * len(current)
            sizes = ideal
        else:
            self._fine_left = max(0, self._fine_left - 1)
            sizes = self._damped(current, ideal, limits)
        # Each change costs the start of a window: the steps until it takes effect and until they
        # settle.
        if self._gain(current, sizes, costs) < LEAST_GAIN:
            self._hold()
            return round_sizes([float(size) for size in current], limits)
        return sizes

    def _refined(self, current: list[int], seconds: Sequence[float], limits: Limits) -> list[int]:
        """Return sizes from the mean of all windows in this HOLD, if the gain is large enough."""
        if (bounded := round_sizes([float(size) for size in current], limits)) != current:
            self._hold_windows.clear()  # memory has run out: these sizes were too large
            return bounded
        self._hold_windows.append(list(seconds))
        if len(self._hold_windows) < HELD_WINDOWS:
            return current
        by_rank = [*zip(*self._hold_windows, strict=True)]
        # The windows' seconds are medians already, so outliers are gone and the mean is more exact.
        means = [statistics.fmean(each) for each in by_rank]
        relative_error = max(
            statistics.stdev(each) / mean if mean else 0.0
            for each, mean in zip(by_rank, means, strict=True)
        ) / math.sqrt(HELD_WINDOWS)
        self._hold_windows.clear()
        costs = [
            # From the model: windows of one size cannot show the fixed part.
            Cost(cost.fixed, (mean - cost.fixed) / size) if size and mean > cost.fixed else cost
            for cost, mean, size in zip(self.costs(), means, current, strict=True)
        ]
        sizes = equal_finish(costs, limits)
        gain = self._gain(current, sizes, costs)
        return sizes if gain >= max(LEAST_GAIN_HELD, NOISE_IN_SPREAD * relative_error) else current

    def _update_holding(self, spread: float) -> bool:
        """Enter or leave HOLD, with hysteresis; return whether the controller holds the sizes."""
        leave_spread = self._raised_by_noise(LEAVE_HOLD_SPREAD)
        solve_spread = self._raised_by_noise(SOLVE_SPREAD)
        # Between the bounds, wait for a second window: the first may be noise.
        if self._holding and leave_spread <= spread <= solve_spread:
            self._uneven_windows += 1
            self._holding = self._uneven_windows < 2
        elif self._holding:
            self._uneven_windows = 0
            self._holding = spread < leave_spread
        elif spread <= self._raised_by_noise(HOLD_SPREAD):
            self._hold()
        return self._holding

    def _record_errors(self, current: Sequence[int], seconds: Sequence[float]) -> None:
        """Record how far each rank's seconds are from its model's prediction, as a share."""
        errors = [
            abs(math.log(each / model.cost.seconds(size)))
            for model, size, each in zip(self._models, current, seconds, strict=True)
            if each > 0 and model.has_measured(size, FINE_SHARE)
        ]
        if errors:
            self._prediction_errors.append(errors)
            del self._prediction_errors[:-NOISE_WINDOWS]

    def _raised_by_noise(self, bound: float) -> float:
        """Return a bound of the spread, raised by the noise.

        The noise is the median of the models' errors, and a single rank that
        changed speed hardly moves it.
        """
        errors = [each for window in self._prediction_errors for each in window]
        return bound + NOISE_IN_SPREAD * (statistics.median(errors) if errors else 0.0)

    def _hold(self) -> None:
        self._holding = True
        self._uneven_windows = 0

    def _damped(self, current: Sequence[int], ideal: Sequence[int], limits: Limits) -> list[int]:
        """Return a step towards `ideal`: at most a tenth of a size, halved at each reversal.

        The total must stay the same. Ranks that still have to move in the needed direction share
        the difference in proportion to their distance, so no size moves away from `ideal` or
        beyond it.
        """
        low, high = limits.lowest(), limits.highest()
        targets = []
        for rank, (size, target) in enumerate(zip(current, ideal, strict=True)):
            move = (target > size) - (target < size)
            if move * self._last_moves[rank] < 0:
                self._damping[rank] /= 2
            self._last_moves[rank] = move or self._last_moves[rank]
            most = max(FINE_SHARE * size, limits.grain)
            step = self._damping[rank] * (target - size)
            targets.append(min(max(size + min(max(step, -most), most), low[rank]), high[rank]))
        missing = limits.total - math.fsum(targets)
        sign = math.copysign(1.0, missing)
        rooms = [max(sign * (end - each), 0.0) for end, each in zip(ideal, targets, strict=True)]
        if total := math.fsum(rooms):
            targets = [t + missing * room / total for t, room in zip(targets, rooms, strict=True)]
        return round_sizes(targets, limits)

    def costs(self) -> list[Cost]:
        """Return every rank's cost; a rank without samples so far gets the slowest known one."""
        measured = [model.cost for model in self._models if model.has_data]
        # A rank that turns out faster soon gets more; one given too much would delay all ranks.
        slowest = max(measured, key=lambda cost: cost.per_sample)
        return [model.cost if model.has_data else slowest for model in self._models]

    def _limits(self, windows: Sequence[Window]) -> Limits:
        """Return the limits, tightened by each rank's memory if they still allow the total."""
        high = [
            # At least a grain, or its least size: a batch that does not fit is computed in parts.
            max(min(most, max(window.max_samples, self.limits.grain)), low)
            for most, window, low in zip(
                self.limits.high, windows, self.limits.lowest(), strict=True
            )
        ]
        tighter = Limits(self.limits.total, self.limits.low, high, self.limits.grain)
        return tighter if sum(tighter.highest()) >= tighter.total else self.limits

    @staticmethod
    def _gain(current: Sequence[int], sizes: Sequence[int], costs: Sequence[Cost]) -> float:
        """Return the share of its time that a step is expected to save."""
        slowest = max(cost.seconds(size) for cost, size in zip(costs, current, strict=True) if size)
        expected = max(cost.seconds(size) for cost, size in zip(costs, sizes, strict=True) if size)
        return 1.0 - expected / slowest

    def resize(self, limits: Limits, sizes: Sequence[int], effective_step: int) -> None:
        """Set another total with its sizes, and restart the window."""
        self.limits, self.sizes = limits, list(sizes)
        self._hold_windows.clear()
        self.measuring_from = effective_step + SETTLING_STEPS

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later decisions depend on; it is equal on all ranks."""
        state: dict[str, Any] = {
            "sizes": self.sizes,
            "measuring_from": self.measuring_from,
            "models": [model.state_dict() for model in self._models],
            "holding": self._holding,
            "uneven_windows": self._uneven_windows,
            "held": self._hold_windows,
            "fine_left": self._fine_left,
            "last_moves": self._last_moves,
            "damping": self._damping,
        }
        if self._prediction_errors:  # left out when empty, as in states of earlier versions
            state["surprises"] = self._prediction_errors
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where another controller with equally many ranks stopped.

        Raises TypeError for sizes that no controller can have.
        """
        ranks, sizes = len(self.sizes), state["sizes"]
        # A state may come from a damaged or forged file: see `checkpoint.validation`.
        for name in ("sizes", "models", "last_moves", "damping"):
            if len(state[name]) != ranks:
                raise TypeError(f"{name} must be of {ranks} ranks, got {len(state[name])}")
        if not all(type(each) is int and 0 <= each <= _MOST_SAMPLES for each in sizes):
            raise TypeError(f"sizes must be of 0 to {_MOST_SAMPLES} samples, got {sizes}")
        self.sizes = list(sizes)
        self.measuring_from = state["measuring_from"]
        for model, model_state in zip(self._models, state["models"], strict=True):
            model.load_state_dict(model_state)
        self._holding = state["holding"]
        self._uneven_windows = state["uneven_windows"]
        self._hold_windows = [list(window) for window in state["held"]]
        self._fine_left = state["fine_left"]
        self._last_moves = list(state["last_moves"])
        self._damping = list(state["damping"])
        self._prediction_errors = [list(window) for window in state.get("surprises", [])]
