"""StepTransaction: one attempt at a step. All buckets are exchanged before any of it counts.

    buckets   0    1    2    last         a bucket is submitted when its gradients are complete, the
    hooks     ^    ^    ^                 last one by `synchronize`: its operation ends the step,
    engine    [0]  [1]  [2]  [last]       and its flags tell every rank if the transaction counts

Each bucket's flags say whether this rank's gradients are finite, which are missing, and how many
samples they have. In buckets submitted by `synchronize` they also say whether the transaction is
void: gradients were changed after their bucket was submitted, or belong to no bucket. The last
bucket's flags also say whether this rank received SIGTERM (`preemption`). On a GPU, and if the
exchange itself finds non-finite values, flags always say finite: then the sum, equal on all ranks,
decides. A rank that joins during a transaction submits the rest as void.

So all ranks do the same: apply the transaction, skip the step because a gradient or a sum is not
finite, or retry with the gradients and ranks that are there by then. A transaction that does not
count leaves residuals unchanged, bit for bit; so does one that was applied to the gradients, if no
optimizer stepped with them.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from ..exchange.sparse_gradients import AnyBucketExchange
from ..runtime.coordinator import Engine
from ..runtime.coordinator.agreement import describe_missing
from ..telemetry.step_report import RecordedStep
from .samples import FLAG_BITS_BELOW_SAMPLES, LocalClip, Samples, is_weighted

NOT_FINITE: Final = 1  # this rank's gradients are not finite
_CHANGED: Final = 2
_UNPLANNED: Final = 4
_JOIN_DESCRIPTOR: Final = b"as a bucket"  # a joined rank has the bucket, too
_PRESENT: Final = 8  # this rank has not joined: a joined rank's flags are 0
PREEMPTED: Final = 16  # this rank received SIGTERM
_ABORTED: Final = 32  # by a rank that is about to join
_MISSING_SHIFT: Final = 6  # a checksum of the names, 29 bits; above it, the samples
_MISSING: Final = (1 << FLAG_BITS_BELOW_SAMPLES) - (1 << _MISSING_SHIFT)


class StepTransaction(RecordedStep):
    """One exchange of all buckets: `submit_early`, `finish`, then `apply`, `skip` or `drop`.

    signature: must be equal on all ranks, in every bucket's operation.
    samples: the sample count behind this rank's gradients.
    weight:  multiplies this rank's gradients, and also clips them. If `samples` has a count, the
             ranks' flags determine it.
    scale:   divides the gradients before the sum, and multiplies the sum.
    predivide: does the same again, in buckets without a residual.
    clip:    clips the gradients, once flags have determined their weight.
    changed: void: on some rank gradients were changed after their bucket was submitted.
    unplanned: void: some rank has a gradient that belongs to no bucket.
    aborted: void: some rank joined before its end.
    some_joined: some rank had joined: it cannot undo its part once the update is applied.
    culprits: by rank, the parameters with non-finite gradients; empty if all are finite, even if
        their sum is not.
    preempted: the ranks that received SIGTERM; known once the last bucket has run.
    lacking: by rank, the parameters without a gradient there that other ranks have one for, so that
        they count as zeros; of the first bucket that has any. Empty if there are none.
    """

    bucket_exchanges: list[AnyBucketExchange]

    def __init__(
        self,
        bucket_exchanges: Sequence[AnyBucketExchange],
        engine: Engine,
        signature: str,
        samples: Samples,
        *,
        missing_is_zero: bool,
        weight: float,
        scale: float,
        predivide: float,
        clip: LocalClip,
    ) -> None:
        super().__init__(list(bucket_exchanges))
        self.changed = self.unplanned = self.aborted = self.some_joined = False
        self.culprits: dict[int, list[str]] = {}
        self.preempted: list[int] = []
        self.lacking: dict[int, list[str]] = {}
        self._ready = time.perf_counter()
        self._engine = engine
        self.samples = samples
        self._signature = [signature, samples.signature]
        self._flags = _PRESENT | samples.flags
        self._missing_is_zero = missing_is_zero
        self.clip = clip
        self._weight = weight
        self._scale, self._predivide = scale, predivide
        self.shadowed: set[int] = set()  # buckets that this joined rank took part in
        self._not_finite = 0  # set to the flag once one of this rank's buckets is not finite
        self._missing_everywhere: dict[int, set[str]] = {}
        # Parameter, its version, and its gradient: a weak reference, so that `zero_grad` frees it.
        self._applied: list[tuple[torch.nn.Parameter, int, weakref.ref[torch.Tensor]]] = []
        self._invalid = False
        self._done = 0  # buckets that ran without an error
        self._stopped = False  # exchange nothing more; the same on all ranks

    def submit_early(self, index: int) -> None:
        """Submit a bucket, except the last one, while the program continues."""
        self._capture_gradients(index)
        self._submit(index, self._not_finite)
        self.bucket_exchanges[index].watch()

    @property
    def void(self) -> bool:
        """Return whether the transaction counts on no rank."""
        return self.changed or self.unplanned or self.aborted

    def abort(self) -> None:
        """Submit all remaining buckets as void, without waiting: this rank is about to join.

        The other ranks end the transaction when they have also submitted every bucket, or joined.
        """
        for index in self._unsubmitted():
            self._submit(index, _ABORTED)
        # This rank has done its part: if others submit a bucket again, it belongs to their retry,
        # for which the reducer opens another transaction.
        self.shadowed.update(self.operations)

    def finish(self, unplanned: bool, preempted: bool) -> None:
        """Submit the remaining buckets, and wait until every rank knows the outcome.

        unplanned: this rank has a gradient that belongs to no bucket.
        preempted: this rank received SIGTERM.
        Raises HorovodInternalError, on every rank alike, if the ranks disagree; then call `drop`.
        """
        self._submit_the_rest(unplanned, preempted)
        # Same order on all ranks: if several operations have failed, all ranks raise the same
        # error.
        for index in sorted(self.operations):
            self.operations[index].wait()

    def _submit_the_rest(self, unplanned: bool, preempted: bool) -> None:
        changed = self._invalid or not all(
            self.bucket_exchanges[index].is_unchanged() for index in self.operations
        )
        unsubmitted = self._unsubmitted()
        # Skip this before a new plan, which would discard the captured gradients.
        if not unplanned:
            for index in unsubmitted:
                self._capture_gradients(index)
        self._ready = time.perf_counter()
        bits = (_CHANGED if changed else 0) | (_UNPLANNED if unplanned else 0) | self._not_finite
        *others, last = unsubmitted
        for index in others:
            self._submit(index, bits)
        # Operations that become ready with the last one may run after it, so wait for them first.
        self.wait_for_operations()
        self._submit(last, bits | (PREEMPTED if preempted else 0))

    def _unsubmitted(self) -> list[int]:
        """Return the buckets that are not submitted yet, including the last one."""
        return [
            index for index in range(len(self.bucket_exchanges)) if index not in self.operations
        ]

    def invalidate(self) -> None:
        """Undo the exchange so far; `finish` will tell the others that the transaction is void."""
        # The engine's thread may still write to the residuals.
        self.wait_for_operations()
        for bucket_exchange in self.bucket_exchanges:
            bucket_exchange.undo()
        self._invalid = True

    def drop(self) -> None:
        """Undo the exchange, after waiting for all submitted operations."""
        self.wait_for_operations()
        self.undo()

    def undo(self) -> None:
        """Undo the exchange; all submitted operations must have ended."""
        for bucket_exchange in self.bucket_exchanges:
            bucket_exchange.undo()
            bucket_exchange.release_gradients()

    def wait_for_operations(self) -> None:
        """Wait until all submitted operations have ended; their errors are ignored."""
        for operation in self.operations.values():
            with suppress(Exception):
                operation.wait()

    @property
    def ready(self) -> float:
        """Return when all of this rank's gradients were computed, on the clock of `spans`."""
        late = [each.ready_at for each in self.exchanged.values() if each.ready_at is not None]
        return max([self._ready, *late])

    @property
    def is_asynchronous(self) -> bool:
        """Return whether gradients were captured before they were computed, as on a GPU."""
        return any(each.ready_at is not None for each in self.exchanged.values())

    def finite(self) -> bool:
        """Return whether the transaction has an update to apply."""
        return not self._stopped and all(each.finite for each in self.exchanged.values())

    def apply(self) -> None:
        """Replace the gradients with the agreed update; until `commit`, `undo` can revert it."""
        for index, bucket_exchange in enumerate(self.bucket_exchanges):
            bucket_exchange.apply(self._missing_everywhere[index])
        self._applied = [
            (parameter, parameter._version, weakref.ref(gradient))
            for bucket_exchange in self.bucket_exchanges
            for parameter in bucket_exchange.parameters
            if (gradient := parameter.grad) is not None
        ]

    def commit(self) -> None:
        """Make the update final: it can no longer be undone."""
        for bucket_exchange in self.bucket_exchanges:
            bucket_exchange.commit()

    @property
    def has_changed_parameters(self) -> bool:
        """Return whether any optimizer changed a parameter since the update was applied.

        Only changes that torch counts are found, not those made through `.data`.
        """
        return any(parameter._version != version for parameter, version, _ in self._applied)

    @property
    def is_discarded(self) -> bool:
        """Return whether the gradients with the update are gone from all parameters."""
        return not any(
            (gradient := parameter.grad) is not None and gradient is _dereference(reference)
            for parameter, _, reference in self._applied
        )

    def skip(self) -> None:
        """Skip the step: undo the transaction, and make all gradients NaN."""
        for bucket_exchange in self.bucket_exchanges:
            bucket_exchange.undo()
            bucket_exchange.poison()

    def shadow_work(self, index: int) -> Callable[[Transport, list[int]], bool]:
        """Return a joined rank's work for a bucket.

        The work sends only the residual; parameters do not change. It returns whether the
        transaction has ended with an update.
        """
        self.shadowed.add(index)
        self.bucket_exchanges[index].capture_zeros(self._scale_of(self.bucket_exchanges[index]))

        def work(transport: Transport, all_flags: list[int]) -> bool:
            self._work(index, [], transport, all_flags)
            # The last bucket ends the transaction: only then does this rank know if it counts.
            if index < len(self.bucket_exchanges) - 1:
                return False
            applies = not self.void and self.finite() and self._done == len(self.bucket_exchanges)
            if not applies:
                self.undo()
                return False
            for bucket_exchange in self.bucket_exchanges:
                bucket_exchange.finish_joined_step()
            return True

        return work

    def _capture_gradients(self, index: int) -> None:
        bucket_exchange = self.bucket_exchanges[index]
        if self.samples.count == 0:  # the gradients may be NaN
            for parameter in bucket_exchange.parameters:
                if (gradient := parameter.grad) is not None:
                    (gradient._values() if gradient.is_sparse else gradient.detach()).zero_()
        scale = self._scale_of(bucket_exchange)
        bucket_exchange.capture_gradients(self._weight / scale, scale)
        if bucket_exchange.checks_finite_first and not bucket_exchange.all_finite():
            self._not_finite = NOT_FINITE

    def _scale_of(self, bucket_exchange: AnyBucketExchange) -> float:
        # A residual may be resumed in a run, or a bucket, with a different predivide factor.
        return self._scale if bucket_exchange.has_residual else self._scale * self._predivide

    def _submit(self, index: int, bits: int) -> None:
        bucket_exchange = self.bucket_exchanges[index]
        missing = bucket_exchange.missing()
        checksum = zlib.crc32("\n".join(missing).encode()) >> 3
        # Send a checksum of the names, because flags only have 35 bits. If checksums differ, the
        # ranks exchange the names (`_check_missing`).
        self.operations[index] = self._engine.submit(
            bucket_exchange.name,
            [*self._signature, bucket_exchange.signature],
            partial(self._work, index, missing),
            flags=self._flags | bits | checksum << _MISSING_SHIFT,
            join_descriptor=_JOIN_DESCRIPTOR,
        )

    def _work(
        self, index: int, missing: list[str], transport: Transport, all_flags: list[int]
    ) -> None:
        """Reduce a bucket on the engine's thread; in the same order of buckets on every rank."""
        begun = time.perf_counter()
        try:
            self._reduce(index, missing, transport, all_flags)
            self._done += 1
        # A disagreement raises on all ranks alike, so no rank exchanges the later buckets.
        except BaseException:
            self._stopped = True
            raise
        finally:
            self.spans.append((begun, time.perf_counter()))

    def _reduce(
        self, index: int, missing: list[str], transport: Transport, all_flags: list[int]
    ) -> None:
        last = index == len(self.bucket_exchanges) - 1
        # Before any return: all ranks learn of SIGTERM in the same attempt, even in a void one.
        if last:
            places = enumerate(all_flags)
            self.preempted = [transport.ranks[n] for n, flags in places if flags & PREEMPTED]
            self.some_joined = not all(flags & _PRESENT for flags in all_flags)
        self.changed |= any(flags & _CHANGED for flags in all_flags)
        self.unplanned |= any(flags & _UNPLANNED for flags in all_flags)
        # If all ranks have aborted, the last bucket may run before others.
        self.aborted |= any(flags & _ABORTED for flags in all_flags)
        # All inputs are flags and sums that are the same on all ranks, so all return or none does.
        # A rank that returned alone would leave the others waiting in the exchange below.
        if self.void or (self._stopped and not last):
            return
        if last and self._done < index:  # the ranks disagree about another bucket
            return
        bucket_exchange = self.bucket_exchanges[index]
        self._check_missing(index, missing, transport, all_flags)
        self._stopped |= any(flags & NOT_FINITE for flags in all_flags)
        if not self._stopped:
            # A joined rank has no gradient, even if its last sample count was not 0.
            if self.samples.count is not None and all_flags[transport.rank] & _PRESENT:
                weight, share = self.samples.weight(all_flags), self.samples.share(all_flags)
                factor = weight * self.clip.factor(weight, share)
                bucket_exchange.set_weight(factor / self._scale_of(bucket_exchange), share)
            # First, so that `undo` also reverts the changes that the next lines make.
            bucket_exchange.snapshot()
            if missing_everywhere := self._missing_everywhere[index]:
                bucket_exchange.exclude(missing_everywhere)
            self.exchanged[index] = bucket_exchange.reduce(transport)
            # Ranks may not have checked their gradients; the sum, equal on all ranks, decides.
            self._stopped = not self.exchanged[index].finite
        if self._stopped and last:
            own = sorted(name for each in self.bucket_exchanges for name in each.not_finite())
            gathered = zip(transport.ranks, transport.gather_object(own), strict=True)
            self.culprits = {rank: names for rank, names in gathered if names}

    def _check_missing(
        self, index: int, missing: list[str], transport: Transport, all_flags: list[int]
    ) -> None:
        # If all checksums agree, the usual case, all ranks lack the same parameters.
        everywhere = set(missing)
        present = [rank for rank, flags in enumerate(all_flags) if flags & _PRESENT]
        checksums = {all_flags[rank] & _MISSING for rank in present}
        # A joined rank has no gradients that would show what all the others lack.
        some_joined = len(present) < len(all_flags) and any(checksums)
        if len(checksums) > 1 or some_joined:
            gathered = transport.gather_object(missing)
            # Leave out ranks with no samples, which rightly have no gradients.
            lacking = {
                transport.ranks[r]: gathered[r] for r in present if is_weighted(all_flags[r])
            }
            if len(set(map(tuple, lacking.values()))) > 1:
                if not self._missing_is_zero:
                    raise MismatchError(
                        "the ranks disagree about which parameters have a gradient: "
                        f"{describe_missing(lacking)}; use the same parameters on every rank, or "
                        "leave out missing_gradients='error'"
                    )
                self.lacking = self.lacking or lacking
            everywhere = set.intersection(*(set(gathered[rank]) for rank in present))
        self._missing_everywhere[index] = everywhere


def _dereference(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor if it still exists; like torch's TensorWeakRef, which is slow to create."""
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensor
