"""What a script may say of its run: `gtopk.record`, `gtopk.log` and `gtopk.log_samples`.

The loss that it logs is watched, too: where that of a compressed run rises, rank 0 warns, once.
"""

from __future__ import annotations

import logging
import math
import operator
import statistics
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..runtime.coordinator.clocks import agree_on_now, clock_offset
from ..runtime.world import world
from ..runtime.world.state import World
from .endpoint import parse_address
from .recorder import Sink
from .start import Settings, balance_of, recorder_of, start

_log = logging.getLogger("gtopk")

WINDOW: Final = 20  # values of the loss that are taken together
_WINDOWS: Final = 100  # that are looked at: a run is fragile in its beginning
_ERRORS: Final = 4.0  # standard errors: a rise that noise is no reason for
_SHARE: Final = 0.05  # of the lowest mean: a rise that matters


def record(
    folder: str = "",
    *,
    every: int = 1,
    tensorboard: str = "",
    prometheus: str = "",
    wandb: str = "",
    mlflow: str = "",
    sinks: Sequence[Sink] = (),
) -> None:
    """Record this run from now on, as GTOPK_RUN and its like do; every rank must call it.

    folder: of a file for each rank, for `gtopk report` and `gtopk top`; "": none.
    every: of so many steps one is written.
    tensorboard: the folder for TensorBoard's scalars, of rank 0.
    wandb, mlflow: the project at Weights & Biases, the experiment at MLflow for the same; in the
        run that rank 0's script has begun, or in a new one.
    prometheus: "PORT" on this host alone, or "HOST:PORT"; local rank r has the r-th port from it.
    sinks: whatever else takes this rank's lines: see `gtopk.telemetry.Sink`.
    Raises OSError where something cannot be opened, ImportError where a package is not installed,
    ValueError for an address or a number that makes no sense.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    address = parse_address(prometheus, "prometheus") if prometheus else None
    settings = Settings(folder, every, tensorboard, address, wandb, mlflow)
    here = world.current()
    here.clock, here.began_unix_seconds = here.engine.submit(
        "clocks", [], lambda t, all_flags: (clock_offset(t), agree_on_now(t))
    ).wait()
    start(here, settings, sinks)


def log(**values: Any) -> None:
    """Note values of the step that is over, as loss=0.31, accuracy=0.92, for the run's record.

    Numbers, or tensors of one element, of this rank; on rank 0 they are drawn and go to
    TensorBoard. Without a record nothing is written. A tensor on a GPU makes the program wait for
    it. What is not finite, or beyond 1e300, is noted as such. Raises ValueError for a name of "".

    With a record or without, rank 0 warns, once, where its `loss` rises in the first 2,000 values
    that are logged of a compressed run.
    """
    if "" in values:
        raise ValueError('values are logged by name, got the name "": log(loss=0.31), say')
    if not world.is_initialized():
        return
    here = world.current()
    if here.rank == 0 and "loss" in values:
        _watch_loss(here, values["loss"])
    recorder = recorder_of(here)
    if recorder is not None:
        recorder.note_values({name: _number(value) for name, value in values.items()})


def log_samples(count: int) -> None:
    """Note that this rank's step under way is of so many samples (or tokens), for the run's record.

    Before the batch's backward pass; those of one step add up: of several backward passes, and of
    the steps between two exchanges of LocalSGD. It weighs nothing, and what tells a step's samples
    anyway, as `adapt` and `set_num_samples` do, has precedence. Without a record this does nothing.
    Raises ValueError for a negative number, TypeError for what is no whole number.
    """
    samples = operator.index(count)
    if samples < 0:
        raise ValueError(f"the number of samples must be at least 0, got {samples}")
    if not world.is_initialized():
        return
    recorder = recorder_of(world.current())
    if recorder is not None:
        recorder.note_samples(samples)


def _number(value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except OverflowError:  # of a whole number beyond all floats
        return math.inf


class _Window(NamedTuple):
    """Values of the loss that followed each other: their mean, its error, and the last's step."""

    mean: float
    error: float
    step: int


class LossWatch:
    """Tells when a loss has risen: in two windows in a row, beyond noise, above its lowest one."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._windows = 0
        self._lowest: _Window | None = None
        self._higher = 0  # windows in a row
        self.is_over = False  # nothing is told any more

    def note(self, value: Any, step: int) -> str:
        """Take a number, or a tensor of one element; return a warning, or "".

        Tensors are read when a window is full, so that a GPU is waited for once in 20 steps.
        """
        if self.is_over:
            return ""
        self._values.append(value.detach() if isinstance(value, torch.Tensor) else value)
        if len(self._values) < WINDOW:
            return ""
        values = [each for each in map(_number, self._values) if math.isfinite(each)]
        self._values = []
        self._windows += 1
        self.is_over = self._windows >= _WINDOWS
        if len(values) < WINDOW // 2:
            return ""  # steps that are skipped have warnings of their own
        error = statistics.stdev(values) / math.sqrt(len(values))
        now = _Window(statistics.fmean(values), error, step)
        lowest = self._lowest
        if lowest is None or now.mean < lowest.mean:
            self._lowest, self._higher = now, 0
            return ""
        rise = now.mean - lowest.mean
        is_rise = rise > max(_ERRORS * math.hypot(error, lowest.error), _SHARE * abs(lowest.mean))
        self._higher = self._higher + 1 if is_rise else 0
        if self._higher < 2:
            return ""
        self.is_over = True
        return (
            f"the loss has risen: its mean over {WINDOW} steps was {lowest.mean:.4g} at step "
            f"{lowest.step}, and is {now.mean:.4g} at step {step}. Compression makes the first "
            "steps of a training fragile: begin with a lower learning rate, or ramp it up more "
            "slowly (gtopk.ramp), and compare with a dense run (docs/tuning.md)"
        )


_watches: Final[WeakKeyDictionary[World, LossWatch]] = WeakKeyDictionary()


def _watch_loss(here: World, loss: Any) -> None:
    """Warn where the loss of a compressed run rises; what is no number is nobody's loss."""
    is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not (is_one or isinstance(loss, int | float)) or not balance_of(here).compresses:
        return
    watch = _watches.setdefault(here, LossWatch())
    if said := watch.note(loss, here.step):
        _log.warning("%s", said)
