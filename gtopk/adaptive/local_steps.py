"""LocalSteps: step reports for modes whose optimizer does not exchange gradients in each step.

WallClock measures where a rank's time goes:

|-- computed --|waits|----- computed -----|waits|-- computed --   all of the wall clock, once

Every second of the wall clock is counted in one step, as computed or as waited. So is every byte of
the mode's operations, except the bytes of the `Counter` with which ranks take samples: it counts
its own.

`replace_step` replaces the distributed optimizer's step with the mode's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch

from ..optim.expected_step import ExpectedStep
from ..optim.peers import Peers
from ..runtime.coordinator import Operation
from ..runtime.world.membership import World
from ..telemetry.recorder import note_residual
from ..telemetry.run_record import note_step, recorder_of
from ..telemetry.step_report import RecordedStep, StepReport, report
from ..telemetry.timeline import Span, Step, timelines
from .replica import RoundExchange

Bounds = tuple[float, float]  # begin and end, from time.perf_counter


class WallClock:
    """Splits the wall clock into waiting for other ranks and computing, which is all other time.

    All times taken add up to the time from `begin` to the last `pop_computed` or wait.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # time before it has been counted
        self._computed: list[Bounds] = []
        self._waits: list[Bounds] = []

    def begin(self) -> None:
        """Start counting, unless counting has started already."""
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting for others; do not nest it."""
        # The time until here was computed; `_end_computing` closes that span.
        began = self._end_computing()
        try:
            yield
        finally:
            if self._since is not None:
                self._since = time.perf_counter()
                self._waits.append((began, self._since))

    def pop_computed(self) -> list[Bounds]:
        """Return the spans of computing since the last call."""
        self._end_computing()
        computed, self._computed = self._computed, []
        return computed

    def pop_waits(self) -> list[Bounds]:
        """Return the spans of waiting since the last call."""
        waits, self._waits = self._waits, []
        return waits

    def _end_computing(self) -> float:
        now = time.perf_counter()
        if self._since is not None:
            self._computed.append((self._since, now))
            self._since = now
        return now


class TimedOperation:
    """An operation that counts the time in `wait` as waiting."""

    def __init__(self, operation: Operation, clock: WallClock) -> None:
        self._operation, self._clock = operation, clock

    @property
    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._operation.done

    def wait(self) -> Any:
        """Return the result, or raise what the operation raises."""
        with self._clock.waiting():
            return self._operation.wait()


class LocalSteps:
    """Reports each step as the optimizer's `last_step`, and to the run's record.

    covers: the kind of step; see `StepReport`.
    clock:  the wall clock that splits this rank's time.
    """

    def __init__(self, world: World, optimizer: Any, covers: str) -> None:
        self._world, self._optimizer, self._covers = world, optimizer, covers
        self._recorded = RecordedStep()
        self._computed: list[Bounds] = []
        self._expected: ExpectedStep | None = None
        self.clock = WallClock()

    def expect(self, exchange: RoundExchange, name: str) -> None:
        """Predict the time of this exchange; all ranks must call it together.

        name: prefix of the measuring operations' names; the same on all ranks.
        """
        policy = self._optimizer.step_policy
        policy.log_compression()
        here, compression = self._world, policy.options.compression
        peers = Peers(here, here.engine, name, range(here.size), takes_part=True)
        self._expected = ExpectedStep(compression, exchange.progress, self._covers)
        with self.clock.waiting():
            self._expected.measure([exchange.bucket_exchange], peers)

    def note_submit(self, operation: Operation) -> TimedOperation:
        """Count an operation's messages in the current step; return the operation to wait for."""
        self._recorded.operations[len(self._recorded.operations)] = operation
        return TimedOperation(operation, self.clock)

    def computed(self) -> None:
        """Attribute computing time so far to the current step, and later time to the next."""
        self._computed += self.clock.pop_computed()

    def note_exchange(self, exchange: RoundExchange) -> None:
        """Record an exchange that has ended, and the residual after it."""
        recorded, reduction = self._recorded, exchange.pop_reduction()
        recorded.bucket_exchanges.append(exchange.bucket_exchange)
        if reduction is not None:
            exchanged, span = reduction
            recorded.exchanged[len(recorded.exchanged)] = exchanged
            recorded.spans.append(span)
            # Sampled now: the next exchange may be running when the step is closed.
            steps = exchange.progress.steps if exchanged.finite else None
            note_residual(recorder_of(self._world), steps, [exchange.bucket_exchange])

    def close(self, step: int, samples: int, local_steps: int = 1, skipped: bool = False) -> None:
        """Report the step, with the time computed until `computed`, and open the next one."""
        recorded, self._recorded = self._recorded, RecordedStep()
        computed, self._computed = self._computed, []
        waits = self.clock.pop_waits()
        # Scripts and observers look there for the steps of every mode.
        self._optimizer.last_step = done = report(
            recorded,
            step=max(0, step),  # -1: this rank has had no batch so far
            compute_seconds=sum(ended - began for began, ended in computed),
            waits=waits,
            expected=self._expected,
            skipped=skipped,
            samples=samples,
            local_steps=local_steps,
            covers=self._covers,
        )
        note_step(self._world, done)
        if (timeline := timelines.get(self._world)) is not None:
            timeline.note_step(self._timeline_step(done, computed, waits))

    def _timeline_step(self, done: StepReport, computed: list[Bounds], waits: list[Bounds]) -> Step:
        """Return the step for the timeline: its whole span, and those computed and waited."""
        arguments = {"step": done.step, "local steps": done.local_steps, "samples": done.samples}
        spans = [Span(self._covers.upper(), computed[0][0], computed[-1][1], arguments)]
        spans += [Span("COMPUTE", *bounds) for bounds in computed]
        spans += [Span("WAIT", *bounds) for bounds in waits]
        kind = f"each {self._covers}"
        name = self._optimizer.step_policy.name
        return Step(name, spans, done.working_seconds, done.hidden_seconds, kind)


def replace_step(optimizer: Any, mode: str, step: Callable[[], None]) -> Callable[..., Any]:
    """Replace `optimizer.step` with a mode's step; return the replaced one."""
    replaced: Callable[..., Any] = optimizer.step

    @wraps(replaced)  # copies the mark with which an earlier scheduler recognizes its step
    def own_step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        optimizer.step_policy.note_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step()
        return loss

    # A bound method: a learning-rate scheduler that is made later can wrap it again.
    optimizer.step = MethodType(own_step, optimizer)
    optimizer.step_policy.stop_exchanging(mode)
    return replaced


def require_batch(batch: object, rank: int, mode: str) -> None:
    """Raise RuntimeError if a step is called without a current batch."""
    if not batch:
        raise RuntimeError(
            f"rank {rank}: optimizer.step() without a current batch; mode {mode!r} takes one step "
            "with each batch of its loader, before loader.drain() and the next batch. Another "
            "loader needs its own optimizer"
        )


def require_one_pass(optimizer: Any, why: str, way_out: str = "") -> None:
    """Raise ValueError if backward passes are accumulated; why: the reason in the message."""
    if optimizer.backward_passes_per_step != 1:
        raise ValueError(
            f"{why}: use backward_passes_per_step=1, got {optimizer.backward_passes_per_step}"
            f"{way_out}"
        )


def require_not_taken(optimizer: Any) -> None:
    """Raise ValueError for an optimizer that a mode has already adapted."""
    if mode := optimizer.step_policy.mode():
        raise ValueError(
            f"the optimizer is already adapted, in mode {mode!r}, and no longer exchanges "
            "gradients itself. For another loader wrap a new plain optimizer with "
            "DistributedOptimizer, after loader.drain(); after a hogbatch mode, whose model stays "
            "in shared memory, resume from a checkpoint in another job"
        )


def require_no_common_step(optimizer: Any, why: str) -> None:
    """Raise ValueError for options that need a common step of all ranks; why: the mode has none."""
    options = optimizer.step_policy.options
    # Each needs an update or a decision that all ranks share.
    for name, value in (
        ("local_clip_norm", options.local_clip_norm),
        ("global_clip_norm", options.global_clip_norm),
        ("scaler", optimizer.scaler),
        ("check_every", options.check_every or None),
    ):
        if value is not None:
            raise ValueError(f"{why}: it does not support {name}")
