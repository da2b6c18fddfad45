"""Timing: what a rank computes on a batch, from its hand-over to its last gradient.

fetch        hand-over                    last gradient      step: select, exchange, apply
---------------|------ forward, backward -------|---------------------------------------------
  waited       |           computed             |   the optimizer's report tells these
"""

from __future__ import annotations

import weakref
from typing import Protocol

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
