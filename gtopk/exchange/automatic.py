"""The automatic exchange: all ranks run the candidate that rank 0's selector chooses.

The cost of choosing: the calibration, about two seconds, or nothing from the cache; some dense
steps, at the start where sparse may be slower, else once they are a hundredth of the time that has
passed; and one allgather of 48 bytes a window of 20 to 640 steps.

What matters is how much an exchange lengthens a step. A bucket has room to hide in from when its
gradients are ready until backward ends, and shares it with the buckets that become ready by then,
by their sizes:

    backward   | a b |  c  |  d  | e |
    bucket a b       [ab....|.....|...]      its share of this: of a, b, c and d
    bucket c                [c....|...]      of c and d
    bucket d                      [d..]
    bucket e                          |      none: backward is over

If exchanges take seconds in proportion to buckets' sizes, all buckets fit their rooms exactly when
they fit one after the other. So each can be judged by itself, though all share one engine. Seconds
beyond its room lengthen the step. A bucket that fits gains nothing by sending less: it is dense.
The last bucket, a single one, and all of them without overlap have no room: all seconds count.
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
    """Exchanges by one of several candidates, and changes over without loss.

    After a change to dense the residual of sparse steps is sent along, a fraction a step.

    budget_share: this bucket's, of the elements that a step exchanges, and so of its budget.
    room_share: this bucket's, of the time from when its gradients are ready until backward ends.
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
        self.selector: AlgorithmSelector | None = None  # None: the ranks have not met yet
        self._progress = progress
        # Never run: the first call replaces it by rank 0's choice.
        self._exchange: Exchange = DenseExchange()
        self._exchanged: Exchanged | None = None  # exchanged, not applied yet
        self._seen: list[tuple[float, ...]] = []  # by step: Measured's seconds, backward's
        self._settling_steps = 0
        self._ended = time.perf_counter()  # the last step's reduction

    @property
    def signature(self) -> str:
        """Return the options, and the candidate that is about to run."""
        now = str(self.selector.chosen.candidate) if self.selector else "undecided"
        return f"{self.compression.signature()}, now {now}"

    @property
    def finds_nonfinite(self) -> bool:
        """Tell whether both sparse and dense exchanges do."""
        return not self.residual.has_moments

    def __call__(self, bucket: Bucket, transport: Transport) -> Exchanged:
        if self.selector is None:
            self.selector = self._begin(bucket, transport)
        # On all ranks in the same step: they have applied the same steps since the last look, those
        # that have joined, too, and every window follows from numbers that all have agreed on.
        elif len(self._seen) >= self.selector.window:
            self._reconsider(self.selector, bucket, transport)
        exchanged = self._exchange(bucket, transport)
        # Alone, a rank measures nothing, and so never looks for another candidate.
        self._exchanged = exchanged if transport.size > 1 else None
        return dataclasses.replace(exchanged, predicted_seconds=self.selector.chosen.seconds)

    def apply(self, bucket: Bucket) -> None:
        """Apply by the exchange that ran; its seconds count as part of selecting."""
        begun = time.perf_counter()
        self._exchange.apply(bucket)
        ended_before, self._ended = self._ended, time.perf_counter()
        if self._exchanged is not None:
            select_seconds = self._exchanged.select_seconds + self._ended - begun
            exchanged = dataclasses.replace(self._exchanged, select_seconds=select_seconds)
            self._record(exchanged, self._ended - ended_before, self._room_seconds(bucket))

    def _room_seconds(self, bucket: Bucket) -> float:
        """Return how long this step's exchange could take without making the step longer."""
        backward_ended = self._progress.backward_began + self._progress.backward_seconds
        return self.room_share * max(0.0, backward_ended - bucket.captured_at)

    def _begin(self, bucket: Bucket, transport: Transport) -> AlgorithmSelector:
        alone = transport.size == 1  # nothing is sent: no links to measure
        calibration = assumed(1) if alone else calibration_of(transport, bucket.device)
        # Negated, as the largest of all ranks' numbers is returned: the shortest backward counts.
        (fastest,) = agree_on_slowest(transport, [-self._progress.backward_seconds])
        selector = AlgorithmSelector(
            self.compression, calibration, bucket.length, bucket.dtype.itemsize, self.budget_share
        )
        self._run(selector, agreed(selector.begin(-fastest), transport), bucket)
        if transport.rank == 0:
            _log.info(
                "compression of %s elements begins with %s, expected to take %.3g ms a step%s, in "
                "a training of %s steps (Compression.auto(steps=...)); links and rates: %s",
                f"{bucket.length:,}",
                selector.chosen.candidate,
                1e3 * selector.chosen.seconds,
                ", to measure what has to be beaten" if selector.probing else "",
                f"{self.compression.steps:,}",
                calibration.origin,
            )
        return selector

    def _record(self, exchanged: Exchanged, step_seconds: float, room_seconds: float) -> None:
        if self._settling_steps:
            self._settling_steps -= 1
            return
        merge_seconds = exchanged.merge_seconds
        self._seen.append(
            (
                exchanged.select_seconds,
                merge_seconds,
                exchanged.communicate_seconds - merge_seconds,
                # Without what did not fit the room: the rest is the same with any exchange.
                step_seconds - max(0.0, exchanged.seconds - room_seconds),
                room_seconds,
                self._progress.backward_seconds,
            )
        )

    def _reconsider(
        self, selector: AlgorithmSelector, bucket: Bucket, transport: Transport
    ) -> None:
        """Compare the measured window with the prediction, and run the candidate that follows.

        All ranks call it together; they run rank 0's candidate.
        """
        *parts, room, backward = map(statistics.median, zip(*self._seen, strict=True))
        self._seen.clear()
        # The slowest rank's seconds count; of the times to hide behind, the least of all ranks.
        *parts, room, backward = agree_on_slowest(transport, [*parts, -room, -backward])
        measured, before = Measured(*parts)._replace(room_seconds=-room), selector.chosen
        candidate = agreed(selector.reconsider(measured, -backward), transport)
        changed = candidate != before.candidate
        if changed:
            self._run(selector, candidate, bucket)
        else:
            selector.run(candidate)  # the same one, with corrections
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
        # Masking and Adam's moments are not given again: the residual, which stays, has them.
        compression = KINDS[candidate.algorithm](
            candidate.density,
            momentum_correction=self.compression.momentum_correction,
            wire=candidate.format.indices,
            values=candidate.format.values,
        ).widened(candidate.widening)
        self._exchange = SparseExchange(bucket, compression, self._progress, self.residual)


def hides_behind_backward(compression: object) -> bool:
    """Tell whether a compression's budget is the time of the backward pass."""
    return isinstance(compression, Automatic) and compression.hide_behind_backward


def agreed(candidate: Candidate, transport: Transport) -> Candidate:
    """Return rank 0's candidate, on every rank."""
    record = transport.broadcast_object(dataclasses.asdict(candidate))
    return Candidate(**{**record, "format": Format(*record["format"])})
