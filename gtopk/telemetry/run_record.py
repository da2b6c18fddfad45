"""A script's own part of its run's record: `gtopk.record`, `gtopk.log` and `gtopk.log_samples`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.coordinator.clocks import agree_on_now, clock_offset
from ..runtime.world import world
from .endpoint import parse_address
from .recorder import Sink
from .start import Settings, recorder_of, start


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
    TensorBoard. Without a record this does nothing. A tensor on a GPU makes the program wait for
    it. What is not finite, or beyond 1e300, is noted as such. Raises ValueError for a name of "".
    """
    if "" in values:
        raise ValueError('values are logged by name, got the name "": log(loss=0.31), say')
    if not world.is_initialized():
        return
    recorder = recorder_of(world.current())
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
