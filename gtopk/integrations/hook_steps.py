"""HookSteps: measures and reports steps whose buckets PyTorch hands over one by one.

program   | backward    a     b     c |wait| optimizer ...      a bucket is handed over, and DDP
engine                  [ a ] [ b ] [ c ]                       waits when it has handed over all
"""

from __future__ import annotations

import math
import time
from typing import Any

from ..exchange.bucket_exchange import BucketExchange
from ..exchange.exchange import Exchanged, Progress
from ..optim.expected_step import ExpectedStep
from ..optim.peers import Peers
from ..runtime.coordinator import Operation
from ..telemetry.recorder import is_sampling_due, sample_residual
from ..telemetry.run_record import balance_of, recorder_of
from ..telemetry.step_report import RecordedStep, StepReport, report
from ..telemetry.stragglers import Stragglers


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
