"""Timing: what a rank computes on a batch, from its hand-over to its last gradient.

fetch        hand-over                    last gradient      step: select, exchange, apply
---------------|------ forward, backward -------|---------------------------------------------
  waited       |           computed             |   the optimizer's report tells these
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol

import torch

from ...buckets.parameters import trained_by
from ...telemetry import StepReport


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

    On a GPU by events on the stream, which are read when the batch is long over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._watched: set[torch.Tensor] = set()
        self._on_gpu = False
        self._began: float | None = None
        self._ended: float | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._watch()

    def hand_over(self, samples: int) -> None:
        """Begin."""
        self._watch()
        self._ended = None
        if self._on_gpu:
            if self._events is None:
                self._events = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
            self._events[0].record()
        self._began = time.perf_counter()

    def _watch(self) -> None:
        """Listen to all that is trained by now: layers are thawed, and groups added."""
        stop = weakref.WeakMethod(self._stop)

        def hook(parameter: torch.Tensor) -> None:
            if (still_there := stop()) is not None:
                still_there()

        for parameter in trained_by(self._optimizer):
            if parameter not in self._watched:
                self._watched.add(parameter)
                self._on_gpu |= parameter.is_cuda
                parameter.register_post_accumulate_grad_hook(hook)

    def _stop(self) -> None:
        self._ended = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def take(self) -> float | None:
        """Return the seconds from the hand-over to the last gradient; None where none came."""
        began, ended = self._began, self._ended
        self._began = self._ended = None
        if began is None or ended is None:
            return None
        if self._events is not None:
            self._events[1].synchronize()
            milliseconds: float = self._events[0].elapsed_time(self._events[1])
            return milliseconds / 1e3
        return ended - began

    def exchanged(self, step: StepReport) -> float:
        """Return what backward did not hide."""
        return step.synchronize_seconds
