"""The steps of a hook, whose buckets DDP or FSDP hands over one by one.

PassTransaction: all buckets of a step count, or none. HookSteps: measures and reports each step.
HookSkips: counts the passes that do not count, and drops their gradients.

program   | backward    a     b     c |wait| optimizer ...      a bucket is handed over, and DDP
engine                  [ a ] [ b ] [ c ]                       waits when it has handed over all
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch

from collectives.ranges import profiled
from collectives.transports import Transport

from ..errors import check_count
from ..exchange.bucket_exchange import BucketExchange
from ..exchange.exchange import Exchanged, Progress
from ..optim.expected_step import ExpectedStep
from ..optim.peers import Peers
from ..optim.skip_counter import SkippedSteps
from ..runtime.coordinator import Operation
from ..telemetry.recorder import is_sampling_due, sample_residual
from ..telemetry.run_record import balance_of, recorder_of
from ..telemetry.step_report import RecordedStep, StepReport, report
from ..telemetry.stragglers import Stragglers


class PassFlags:
    """The flags of a bucket, and of the end of a pass; NOT_FINITE is one of both."""

    NOT_FINITE: Final = 1  # this rank's gradients are not finite
    PREEMPTED: Final = 2  # of a bucket: this rank had SIGTERM
    VOID: Final = 2  # of the end: the pass does not count
    SPOILT: Final = 4  # some gradients are still the NaN that an earlier pass made of them
    CLEARED: Final = 8  # some of those gradients were cleared since

    @classmethod
    def is_void(cls, all_flags: Sequence[int]) -> bool:
        """Tell whether a pass is void, from all ranks' flags.

        It is where a rank says VOID, or where gradients were added to an earlier pass's NaN and
        none was cleared. If some were cleared, the rest belong to no optimizer and stay NaN; they
        void no further pass.
        """
        said = functools.reduce(operator.or_, all_flags)
        return bool(said & cls.VOID) or said & (cls.SPOILT | cls.CLEARED) == cls.SPOILT


def flags_of(bucket_exchange: BucketExchange) -> int:
    """Return NOT_FINITE where this rank's gradients are not; 0 where the exchange finds that."""
    return (
        PassFlags.NOT_FINITE
        if bucket_exchange.checks_finite_first and not bucket_exchange.all_finite()
        else 0
    )


class PassTransaction:
    """Exchanges the buckets of a step; undoes them all where a gradient or a sum is not finite.

    Gradients that were handed back cannot be recalled. So the bucket that failed, and all that
    follow it, are made NaN: the optimizer's user sees that and skips the whole step. The residual
    is then, to the bit, what it was before the step.

    not_finite: the places of the ranks whose gradients of the last bucket were not finite, though
        their flags had not said so. The same on all ranks.
    """

    def __init__(self) -> None:
        self.not_finite: list[int] = []
        self._exchanged: list[BucketExchange] = []
        self._void = False

    def run(
        self, bucket_exchange: BucketExchange, transport: Transport, all_flags: Sequence[int]
    ) -> Exchanged | None:
        """Replace a bucket's gradients by the agreed sum, or by NaN.

        Returns what the exchange did, its select_seconds with those of applying; None where the
        step was void already, and nothing was exchanged.
        """
        again = (
            bucket_exchange in self._exchanged
        )  # a module that is used twice: keep what was remembered before the step
        self._exchanged.append(bucket_exchange)
        self.not_finite = []
        self._void |= any(flags & PassFlags.NOT_FINITE for flags in all_flags)
        exchanged = None
        if not self._void:
            if not again:
                bucket_exchange.snapshot()
            exchanged = bucket_exchange.reduce(transport)
            if not exchanged.finite:  # on all ranks alike
                self._void = True
                said = transport.gather_object(not bucket_exchange.all_finite())
                self.not_finite = [place for place, is_theirs in enumerate(said) if is_theirs]
        if self._void:
            self.drop()
            with bucket_exchange.bucket.on_stream():
                bucket_exchange.bucket.poison()
            return exchanged
        begun = time.perf_counter()
        with profiled("apply"), bucket_exchange.bucket.on_stream():
            bucket_exchange.exchange.apply(bucket_exchange.bucket)
        assert exchanged is not None
        seconds = exchanged.select_seconds + time.perf_counter() - begun
        return replace(exchanged, select_seconds=seconds)

    def drop(self) -> None:
        """Make the step void: the residual becomes what it was before."""
        self._void = True
        for bucket_exchange in self._exchanged:
            bucket_exchange.undo()

    @property
    def is_void(self) -> bool:
        """Whether the step does not count on any rank."""
        return self._void

    @property
    def buckets(self) -> int:
        """How many buckets were handed over in this step."""
        return len(self._exchanged)

    def close(self) -> bool:
        """End the step, and tell whether it counted."""
        counted = not self._void
        for bucket_exchange in self._exchanged:
            bucket_exchange.release_gradients()
        self._exchanged, self._void = [], False
        return counted


class HookSteps:
    """Reports each step, also to the run's record, and counts the world's steps.

    After the first, all ranks measure their links to predict such steps; the program waits.

    last: the report of the last step; None before the first.
    stragglers: how fast the ranks compute, beside each other.
    """

    def __init__(self, peers: Peers, compression: Any, progress: Progress) -> None:
        """peers: the ranks that exchange together; progress: the caller counts its steps."""
        self._world, self._peers = peers.world, peers
        self.stragglers = Stragglers(peers.world, peers.engine, peers.name)
        self._expected = ExpectedStep(compression, progress)
        self._sizes: list[int] = []  # of the buckets that the prediction is for
        self._seen = RecordedStep()
        self._counted = 0  # steps that were not skipped
        self._waited_since: float | None = None
        self._waited_seconds = 0.0
        self._ended: float | None = None  # when the last wait ended
        self._ended_before: float | None = None  # when that of the previous step ended
        self.last: StepReport | None = None

    def add_bucket(self, bucket_exchange: BucketExchange) -> int:
        """Note a bucket, in the program's thread; return its number in the step."""
        self._seen.bucket_exchanges.append(bucket_exchange)
        return len(self._seen.bucket_exchanges) - 1

    def note_submit(self, number: int, operation: Operation) -> None:
        """Note that a bucket was submitted, in the program's thread, which may wait from now on."""
        self._seen.operations[number] = operation
        self._waited_since = time.perf_counter()

    def note_exchange(self, number: int, began: float, exchanged: Exchanged | None) -> None:
        """Note, in the engine's thread, the result of a bucket's exchange."""
        if exchanged is not None:
            self._seen.exchanged[number] = exchanged
        self._seen.spans.append((began, time.perf_counter()))

    def drop(self) -> None:
        """Forget a step that an error has ended."""
        self._seen = RecordedStep()

    def note_wait_end(self) -> None:
        """Note that the program's wait has ended."""
        self._ended = time.perf_counter()
        if self._waited_since is not None:
            self._waited_seconds += self._ended - self._waited_since

    def close(self, counted: bool, overlapped: bool) -> None:
        """Report the step, and begin another; all ranks call it after the same step.

        overlapped: the program has waited for the last bucket only, not for each.
        """
        self._expect()
        ended, before = self._ended or 0.0, self._ended_before
        self.last = report(
            self._seen,
            step=self._world.step,
            compute_seconds=max(0.0, ended - before - self._waited_seconds) if before else 0.0,
            waits=[((self._waited_since or 0.0) if overlapped else 0.0, math.inf)],
            synchronize_seconds=self._waited_seconds,
            apply_seconds=0.0,  # the engine's thread applies
            predicted_seconds=self._expected.seconds,
            skipped=not counted,
            samples=None,
            dense_seconds=self._expected.dense_seconds,
        )
        balance_of(self._world).note(self.last)
        bucket_exchanges = self._seen.bucket_exchanges
        self._seen, self._waited_seconds, self._ended_before = RecordedStep(), 0.0, ended
        self._world.step += 1
        self._counted += counted
        if counted:
            self.stragglers.note(self._counted, self.last.compute_seconds or None)
        if (recorder := recorder_of(self._world)) is not None:
            recorder.note_step(self.last)
            if counted and is_sampling_due(self._counted):
                sample_residual(recorder, bucket_exchanges)

    def _expect(self) -> None:
        """Predict the exchange of the last step's buckets; measure links after the first step."""
        sizes = [bucket_exchange.elements for bucket_exchange in self._seen.bucket_exchanges]
        if not self._sizes:
            begun = time.perf_counter()
            self._expected.measure(self._seen.bucket_exchanges, self._peers)
            self._ended = time.perf_counter()
            self._waited_seconds += self._ended - begun
        elif sizes != self._sizes:
            self._expected.expect(self._seen.bucket_exchanges)
        self._sizes = sizes


_everyones: Final[WeakSet[HookSkips]] = WeakSet()


class HookSkips:
    """Notes whether passes count, for one model whose gradients a hook exchanges.

    Only this model's gradients are dropped: an optimizer may step several models, and agreed
    gradients of the others were sent for good.
    parameters: returns the model's parameters.
    max_skipped_steps: how many passes in a row may not count.
    skipped: how many passes did not count; counted: whether the last one does.
    """

    def __init__(
        self, parameters: Callable[[], Collection[torch.Tensor]], max_skipped_steps: int
    ) -> None:
        check_count("max_skipped_steps", max_skipped_steps)
        self.parameters = parameters
        self.counted = True  # the last pass
        self._skipped = SkippedSteps(max_skipped_steps)
        self._dropped: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        _everyones.add(self)

    @property
    def skipped(self) -> int:
        """How many passes did not count."""
        return self._skipped.count

    def note(self, counted: bool, rank: int, step: int, where: str) -> None:
        """Note whether a pass that has ended counts; warn of one that does not.

        where: the ranks whose gradients are not finite; "": only the sum is not.
        Raises FloatingPointError where more passes in a row did not count than allowed.
        """
        self.counted = counted
        if counted:
            self._skipped.end_row()
        else:
            self._skipped.note(rank, step, where)

    def end_row(self) -> None:
        """Begin a new row: a state was loaded."""
        self._skipped.end_row()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients, once, where the last pass does not count.

        Gradients of other models with a hook of gtopk stay: they hold what was sent for them.
        """
        if self.counted or self._dropped.get(optimizer) == self.skipped:
            return
        self._dropped[optimizer] = self.skipped  # later gradients are of another pass
        others = set[torch.Tensor]().union(*(each.parameters() for each in _everyones))
        kept = others.difference(self.parameters())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in kept:
                    parameter.grad = None
