"""The automatic exchange: all ranks run the candidate that rank 0's selector chooses.

Choosing costs: a calibration of about two seconds, or none if cached; some dense steps, at the
start if sparse may be slower, otherwise when they take a hundredth of the time that has passed; and
an allgather of 48 bytes per window of 20 to 640 steps.

What matters is how much an exchange lengthens a step. Backward can hide an exchange from the time
when the bucket's gradients are ready until backward ends (its "room"). Buckets that are ready by
then share this time, in proportion to their sizes:

    backward   | a b |  c  |  d  | e |
    bucket a b       [ab....|.....|...]      its share of this: of a, b, c and d
    bucket c                [c....|...]      of c and d
    bucket d                      [d..]
    bucket e                          |      none: backward is over

If exchanges take time in proportion to bucket sizes, all buckets fit their rooms exactly if they
fit one after the other. So each bucket can be judged alone, though all share one engine. Seconds
beyond its room lengthen the step. A bucket that fits gains nothing by sending less: it is dense.
The last bucket has no room, nor has a single bucket, nor any bucket without overlap: all their
seconds count.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Mapping
from typing import Final

from collectives.cost_model import Candidate, Format
from collectives.cost_model.calibration import assumed
from collectives.cost_model.probes import agree_on_slowest
from collectives.transports import Transport

from ..compression import Automatic, GTopK, Hierarchical, OkTopK, SparseCompression, TopK
from .algorithm_selector import AlgorithmSelector, Measured
from .buckets.buckets import Bucket
from .calibration import calibration_of
from .exchange import DenseExchange, Exchange, Exchanged, Progress, SparseExchange, open_residual
from .residual import Residual

_log = logging.getLogger("gtopk")

SETTLING_STEPS: Final = 2  # not measured after a switch: no threshold yet, and cold caches
KINDS: Final[Mapping[str, type[SparseCompression]]] = {
    kind.algorithm: kind for kind in (TopK, GTopK, OkTopK, Hierarchical)
}


class AutomaticExchange:
    """Run one of several candidates, and switch between them without losing gradient mass.

    After a switch to dense, the residual of the sparse steps is sent along, a fraction per step.

    budget_share: this bucket's share of the elements of a step, and so of its budget.
    room_share: this bucket's share of the time from when its gradients are ready until backward
        ends.
    """

    def __init__(
        self,
        bucket: Bucket,
        compression: Automatic,
        progress: Progress,
        budget_share: float = 1.0,
        room_share: float = 1.0,
    ) -> None:
        self.compression = compression
        self.budget_share = budget_share
        self.room_share = room_share
        self.residual: Residual = open_residual(bucket, compression)
        self.selector: AlgorithmSelector | None = None  # None until the first collective call
        self._progress = progress
        # Never run: the first call replaces it with rank 0's choice.
        self._exchange: Exchange = DenseExchange()
        self._exchanged: Exchanged | None = None  # exchanged, but not applied yet
        self._window: list[tuple[float, ...]] = []  # by step: Measured's seconds, backward's
        self._settling_steps = 0
        self._ended = time.perf_counter()  # end of the last step's reduction

    @property
    def signature(self) -> str:
        """Return the options and the candidate that runs next."""
        now = str(self.selector.chosen.candidate) if self.selector else "undecided"
        return f"{self.compression.signature()}, now {now}"

    @property
    def finds_nonfinite(self) -> bool:
        """Return True if both sparse and dense exchanges find non-finite gradients."""
        return not self.residual.has_moments

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        if self.selector is None:
            self.selector = self._begin(bucket, transport)
        # All ranks get here in the same step: they (also joined ranks) have applied the same steps
        # since the last window, and window sizes follow from agreed numbers.
        elif len(self._window) >= self.selector.window:
            self._reconsider(self.selector, bucket, transport)
        exchanged = self._exchange(bucket, transport)
        # A rank alone measures nothing, so it never considers another candidate.
        self._exchanged = exchanged if transport.size > 1 else None
        return dataclasses.replace(exchanged, predicted_seconds=self.selector.chosen.seconds)

    def apply(self, bucket: Bucket) -> None:
        """Apply with the exchange that ran; its seconds count towards selecting."""
        begun = time.perf_counter()
        self._exchange.apply(bucket)
        ended_before, self._ended = self._ended, time.perf_counter()
        if self._exchanged is not None:
            select_seconds = self._exchanged.select_seconds + self._ended - begun
            exchanged = dataclasses.replace(self._exchanged, select_seconds=select_seconds)
            self._record(exchanged, self._ended - ended_before, self._room_seconds(bucket))

    def _room_seconds(self, bucket: Bucket) -> float:
        """Return how long this step's exchange could take without lengthening the step."""
        backward_ended = self._progress.backward_began + self._progress.backward_seconds
        return self.room_share * max(0.0, backward_ended - bucket.captured_at)

    def _begin(self, bucket: Bucket, transport: Transport) -> AlgorithmSelector:
        alone = transport.size == 1  # nothing is sent, so no links need measuring
        calibration = assumed(1) if alone else calibration_of(transport, bucket.device)
        # Negated, because agree_on_slowest returns maxima: the shortest backward counts.
        (fastest,) = agree_on_slowest(transport, [-self._progress.backward_seconds])
        selector = AlgorithmSelector(
            self.compression, calibration, bucket.length, bucket.dtype.itemsize, self.budget_share
        )
        self._run(selector, broadcast_candidate(selector.begin(-fastest), transport), bucket)
        if transport.rank == 0:
            _log.info(
                "compression of %s elements starts with %s, expected to take %.3g ms a step%s, in "
                "a training of %s steps (Compression.auto(steps=...)); links and rates: %s",
                f"{bucket.length:,}",
                selector.chosen.candidate,
                1e3 * selector.chosen.seconds,
                ", to measure the time to beat" if selector.probing else "",
                f"{self.compression.steps:,}",
                calibration.origin,
            )
        return selector

    def _record(self, exchanged: Exchanged, step_seconds: float, room_seconds: float) -> None:
        if self._settling_steps:
            self._settling_steps -= 1
            return
        merge_seconds = exchanged.merge_seconds
        self._window.append(
            (
                exchanged.select_seconds,
                merge_seconds,
                exchanged.communicate_seconds - merge_seconds,
                # Without the excess over the room: the rest is the same for any exchange.
                step_seconds - max(0.0, exchanged.seconds - room_seconds),
                room_seconds,
                self._progress.backward_seconds,
            )
        )

    def _reconsider(
        self, selector: AlgorithmSelector, bucket: Bucket, transport: Transport
    ) -> None:
        """Compare the measured window with the prediction, and run the resulting candidate.

        A collective: all ranks run rank 0's candidate.
        """
        *parts, room, backward = map(statistics.median, zip(*self._window, strict=True))
        self._window.clear()
        # The slowest rank's seconds count; for time to hide behind, the least of all ranks.
        *parts, room, backward = agree_on_slowest(transport, [*parts, -room, -backward])
        measured, before = Measured(*parts)._replace(room_seconds=-room), selector.chosen
        candidate = broadcast_candidate(selector.reconsider(measured, -backward), transport)
        changed = candidate != before.candidate
        if changed:
            self._run(selector, candidate, bucket)
        else:
            selector.run(candidate)  # the same candidate, with new corrections
        if transport.rank == 0:
            room_ms = 1e3 * measured.room_seconds
            _log.log(
                logging.WARNING if changed else logging.INFO,
                "compression of %s elements by %s took %.3g ms a step, expected %.3g%s%s",
                f"{bucket.length:,}",
                before.candidate,
                1e3 * measured.seconds,
                1e3 * before.seconds,
                f", of which backward may hide {room_ms:.3g}" if room_ms else "",
                f"; from now on {selector.chosen.candidate}, expected to take "
                f"{1e3 * selector.chosen.seconds:.3g}"
                if changed
                else "",
            )

    def _run(self, selector: AlgorithmSelector, candidate: Candidate, bucket: Bucket) -> None:
        """Run another candidate from now on; the residual stays."""
        selector.run(candidate)
        self._settling_steps = SETTLING_STEPS
        if candidate.algorithm == "dense":
            self._exchange = DenseExchange(self.residual)
            return
        # No masking or Adam moments here: the residual, which stays, has them.
        compression = KINDS[candidate.algorithm](
            candidate.density,
            momentum_correction=self.compression.momentum_correction,
            wire=candidate.format.indices,
            values=candidate.format.values,
        ).widened(candidate.widening)
        self._exchange = SparseExchange(bucket, compression, self._progress, self.residual)


def hides_behind_backward(compression: object) -> bool:
    """Return whether a compression's budget is the time of the backward pass."""
    return isinstance(compression, Automatic) and compression.hide_behind_backward


def broadcast_candidate(candidate: Candidate, transport: Transport) -> Candidate:
    """Return rank 0's candidate, on every rank."""
    record = transport.broadcast_object(dataclasses.asdict(candidate))
    return Candidate(**{**record, "format": Format(*record["format"])})
