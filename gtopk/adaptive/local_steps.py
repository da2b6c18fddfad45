"""LocalSteps: the step reports of a mode whose optimizer does not exchange gradients in each step.

WallClock measures where a rank's time goes:

|-- computed --|waits|----- computed -----|waits|-- computed --   all of the wall clock, once

Every second of the wall clock is in one step, as computed or waited, and so is every byte of the
mode's operations. The `Counter` by which ranks take samples counts its own bytes, which are not
included here.

`replace_step` puts a mode's own step in the place of the distributed optimizer's.
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

Bounds = tuple[float, float]  # begin and end, by time.perf_counter


class WallClock:
    """Splits the wall clock into waiting for others, and all else, which counts as computing.

    Law: all times taken add up to the time from `begin` to the last `pop_computed`, or wait.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # all time before it is accounted for
        self._computed: list[Bounds] = []
        self._waits: list[Bounds] = []

    def begin(self) -> None:
        """Count from now on, unless counting has begun already."""
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time meanwhile as waiting for others; do not nest it."""
        # The time until here was computed: `_pass` closes that span.
        began = self._pass()
        try:
            yield
        finally:
            if self._since is not None:
                self._since = time.perf_counter()
                self._waits.append((began, self._since))

    def pop_computed(self) -> list[Bounds]:
        """Return the spans without waiting since the last call."""
        self._pass()
        computed, self._computed = self._computed, []
        return computed

    def pop_waits(self) -> list[Bounds]:
        """Return the spans of waiting since the last call."""
        waits, self._waits = self._waits, []
        return waits

    def _pass(self) -> float:
        now = time.perf_counter()
        if self._since is not None:
            self._computed.append((self._since, now))
            self._since = now
        return now


class TimedOperation:
    """An operation; the time spent in `wait` is counted as waiting."""

    def __init__(self, operation: Operation, spent: WallClock) -> None:
        self._operation, self._spent = operation, spent

    @property
    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._operation.done

    def wait(self) -> Any:
        """Return the result, or raise what the operation raises."""
        with self._spent.waiting():
            return self._operation.wait()


class LocalSteps:
    """Reports each step as the optimizer's `last_step`, and to the run's record.

    covers: the kind of step; see `StepReport`.
    spent:  splits this rank's time.
    """

    def __init__(self, world: World, optimizer: Any, covers: str) -> None:
        self._world, self._optimizer, self._covers = world, optimizer, covers
        self._seen = RecordedStep()
        self._computed: list[Bounds] = []
        self._expected: ExpectedStep | None = None
        self.spent = WallClock()

    def expect(self, exchange: RoundExchange, name: str) -> None:
        """Predict the time of this exchange between all ranks, which call it together.

        name: prefix of the operations for it, equal on all ranks.
        """
        policy = self._optimizer.step_policy
        policy.log_compression()
        here, compression = self._world, policy.options.compression
        peers = Peers(here, here.engine, name, range(here.size), takes_part=True)
        self._expected = ExpectedStep(compression, exchange.progress, self._covers)
        with self.spent.waiting():
            self._expected.measure([exchange.bucket_exchange], peers)

    def note_submit(self, operation: Operation) -> TimedOperation:
        """Attribute an operation's messages to the current step; return it, to be waited for."""
        self._seen.operations[len(self._seen.operations)] = operation
        return TimedOperation(operation, self.spent)

    def computed(self) -> None:
        """Attribute computing time up to now to the current step, and later time to the next."""
        self._computed += self.spent.pop_computed()

    def note_exchange(self, exchange: RoundExchange) -> None:
        """Record an exchange whose operation is over, and the residual after it."""
        seen, ran = self._seen, exchange.pop_reduction()
        seen.bucket_exchanges.append(exchange.bucket_exchange)
        if ran is not None:
            seen.exchanged[len(seen.exchanged)] = ran.exchanged
            seen.spans.append((ran.began, ran.ended))
            # Here, as the next exchange may be under way when the step is closed.
            steps = exchange.progress.steps if ran.exchanged.finite else None
            note_residual(recorder_of(self._world), steps, [exchange.bucket_exchange])

    def close(self, step: int, samples: int, local_steps: int = 1, skipped: bool = False) -> None:
        """Report the step, with the time computed until `computed`, and begin another."""
        seen, self._seen = self._seen, RecordedStep()
        computed, self._computed = self._computed, []
        waits = self.spent.pop_waits()
        # In the optimizer's place, where scripts and observers look for every mode's steps.
        self._optimizer.last_step = done = report(
            seen,
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
        said = {"step": done.step, "local steps": done.local_steps, "samples": done.samples}
        spans = [Span(self._covers.upper(), computed[0][0], computed[-1][1], said)]
        spans += [Span("COMPUTE", *bounds) for bounds in computed]
        spans += [Span("WAIT", *bounds) for bounds in waits]
        kind = f"each {self._covers}"
        name = self._optimizer.step_policy.name
        return Step(name, spans, done.working_seconds, done.hidden_seconds, kind)


def replace_step(optimizer: Any, mode: str, step: Callable[[], None]) -> Callable[..., Any]:
    """Replace `optimizer.step` by a mode's, which gets the gradients; return the one before."""
    before: Callable[..., Any] = optimizer.step

    @wraps(before)  # copies the mark by which an earlier scheduler knows its step
    def own_step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        optimizer.step_policy.note_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step()
        return loss

    # Bound to the optimizer: a learning-rate scheduler made later wraps it once more.
    optimizer.step = MethodType(own_step, optimizer)
    optimizer.step_policy.stop_exchanging(mode)
    return before


def require_batch(batch: object, rank: int, mode: str) -> None:
    """Raise RuntimeError in a step without a current batch."""
    if not batch:
        raise RuntimeError(
            f"rank {rank}: optimizer.step() without a batch in hand; mode {mode!r} takes one step "
            "with each batch of its loader, before loader.drain() and the next batch: another "
            "loader needs an optimizer of its own"
        )


def require_one_pass(optimizer: Any, why: str, way_out: str = "") -> None:
    """Raise ValueError where backward passes add up; why: this is not for them."""
    if optimizer.backward_passes_per_step != 1:
        raise ValueError(
            f"{why}: use backward_passes_per_step=1, got {optimizer.backward_passes_per_step}"
            f"{way_out}"
        )


def require_not_taken(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose step a mode has taken over."""
    if mode := optimizer.step_policy.mode():
        raise ValueError(
            f"the optimizer is adapted already, in mode {mode!r}, and exchanges no gradients of "
            "its own any more. For another loader wrap a new plain optimizer by "
            "DistributedOptimizer, after loader.drain(); or, from a hogbatch mode, whose model "
            "stays shared memory, go on in another job, by a checkpoint"
        )


def require_no_common_step(optimizer: Any, why: str) -> None:
    """Raise ValueError for options that need a common step of all ranks; why: there is none."""
    asked = optimizer.step_policy.options
    # Each needs one update that all ranks share, or one decision of all ranks about it.
    for name, value in (
        ("local_clip_norm", asked.local_clip_norm),
        ("global_clip_norm", asked.global_clip_norm),
        ("scaler", optimizer.scaler),
        ("check_every", asked.check_every or None),
    ):
        if value is not None:
            raise ValueError(f"{why}: it takes no {name}")
