"""StepTransaction: one try at a step. All buckets are exchanged before any of it counts.

    buckets   0    1    2    last         a bucket is submitted when its gradients are complete, the
    hooks     ^    ^    ^                 last one by `synchronize`: its operation is the step's end
    engine    [0]  [1]  [2]  [last]       whose flags tell every rank whether the transaction counts

Each bucket's flags say whether this rank's gradients are finite, which are missing, and of how many
samples they are. In buckets that `synchronize` submits they also say whether the transaction is
void: gradients were changed after their bucket was submitted, or belong to no bucket. The last
bucket's flags also say whether this rank had SIGTERM (`preemption`). On a GPU, and where the
exchange itself finds values that are not finite, flags always say finite: the sum, the same on all
ranks, tells. A rank that joins in the middle of a transaction submits the rest as void.

So all ranks do the same: they apply the transaction, skip the step because a gradient or a sum is
not finite, or try again with the gradients and ranks that are there by then. A transaction that
does not count leaves residuals as they were, to the bit; so does one whose update was applied to
the gradients, if no optimizer stepped with them.
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

from ..exchange.buckets.parameters import lacks_gradient
from ..exchange.sparse_gradients import AnyBucketExchange
from ..runtime.coordinator import Engine
from ..runtime.coordinator.agreement import describe_missing
from ..telemetry.step_report import RecordedStep
from .samples import FLAG_BITS_BELOW_SAMPLES, LocalClip, Samples, is_weighted

NOT_FINITE: Final = 1  # this rank's gradients are not finite
_CHANGED: Final = 2
_UNPLANNED: Final = 4
_JOIN_DESCRIPTOR: Final = b"as a bucket"  # a rank that has joined has the bucket, too
_HERE: Final = 8  # this rank has not joined: the flags of one that has are 0
PREEMPTED: Final = 16  # this rank had SIGTERM
_ABORTED: Final = 32  # by a rank that is about to join
_MISSING_SHIFT: Final = 6  # a checksum of the names, 29 bits; above it, the samples
_MISSING: Final = (1 << FLAG_BITS_BELOW_SAMPLES) - (1 << _MISSING_SHIFT)


class StepTransaction(RecordedStep):
    """One exchange of all buckets: `submit_early`, `finish`, then `apply`, `skip` or `drop`.

    signature: what must be equal on all ranks, in every bucket's operation.
    samples: the number behind this rank's gradients.
    weight:  this rank's gradients are multiplied with it, which clips them, too. Where `samples`
             has a count, it follows from the ranks' flags.
    scale:   divides the gradients before the sum, and multiplies the sum.
    predivide: does the same again, in buckets without a residual.
    clip:    shortens the gradients, once their weight is known from flags.
    changed: void: on some rank gradients were changed after their bucket was submitted.
    unplanned: void: some rank has a gradient that belongs to no bucket.
    aborted: void: some rank joined before its end.
    culprits: by rank, the parameters whose gradients are not finite; empty where all are finite,
        also if their sum is not.
    preempted: the ranks that had SIGTERM; known once the last bucket was run.
    lacking: by rank, the parameters without a gradient there, which count as zeros as other ranks
        have one; of the first bucket that has such. Empty where none has.
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
        self.changed = self.unplanned = self.aborted = False
        self.culprits: dict[int, list[str]] = {}
        self.preempted: list[int] = []
        self.lacking: dict[int, list[str]] = {}
        self._ready = time.perf_counter()
        self._engine = engine
        self.samples = samples
        self._signature = [signature, samples.signature]
        self._flags = _HERE | samples.flags
        self._missing_is_zero = missing_is_zero
        self.clip = clip
        self._weight = weight
        self._scale, self._predivide = scale, predivide
        self.shadowed: set[int] = set()  # buckets
        self._not_finite = 0  # the flag, once a bucket of this rank is not
        self._missing_everywhere: dict[int, set[str]] = {}
        # Parameter, its version, its gradient: a weak reference, so that `zero_grad` frees it.
        self._applied: list[tuple[torch.nn.Parameter, int, weakref.ref[torch.Tensor]]] = []
        self._invalid = False
        self._done = 0  # how many buckets were run without an error
        self._stopped = False  # nothing more is exchanged; the same on all ranks

    def submit_early(self, index: int) -> None:
        """Submit a bucket, not the last one, while the program goes on."""
        self._capture_gradients(index)
        self._submit(index, self._not_finite)
        self.bucket_exchanges[index].watch()

    @property
    def void(self) -> bool:
        """Tell whether the transaction counts on no rank."""
        return self.changed or self.unplanned or self.aborted

    def abort(self) -> None:
        """Submit all buckets that are left as void, and do not wait: this rank is about to join.

        The others end the transaction when they, too, have submitted every bucket, or joined.
        """
        for index in self._late():
            self._submit(index, _ABORTED)
        # This rank's part in them is done: a bucket that the others submit again is of their next
        # try, for which the reducer opens another transaction.
        self.shadowed.update(self.operations)

    def finish(self, unplanned: bool, preempted: bool) -> None:
        """Submit the buckets that are left, and wait until every rank knows the outcome.

        unplanned: this rank has a gradient that belongs to no bucket.
        preempted: this rank had SIGTERM.
        Raises HorovodInternalError, on every rank alike, where the ranks disagree: `drop` it then.
        """
        self._submit_the_rest(unplanned, preempted)
        # In one order on all ranks: where several operations have failed, each raises the same
        # error.
        for index in sorted(self.operations):
            self.operations[index].wait()

    def _submit_the_rest(self, unplanned: bool, preempted: bool) -> None:
        changed = self._invalid or not all(
            self.bucket_exchanges[index].is_unchanged() for index in self.operations
        )
        late = self._late()
        # With another plan to come they would be captured in vain.
        if not unplanned:
            for index in late:
                self._capture_gradients(index)
        self._ready = time.perf_counter()
        bits = (_CHANGED if changed else 0) | (_UNPLANNED if unplanned else 0) | self._not_finite
        *others, last = late
        for index in others:
            self._submit(index, bits)
        # Operations that get ready with the last one may be run after it: wait for them first.
        self.wait_for_operations()
        self._submit(last, bits | (PREEMPTED if preempted else 0))

    def _late(self) -> list[int]:
        """Return the buckets that are not submitted yet; the last bucket is one of them."""
        return [
            index for index in range(len(self.bucket_exchanges)) if index not in self.operations
        ]

    def invalidate(self) -> None:
        """Undo what was exchanged; `finish` will tell the others that the transaction is void."""
        # The engine's thread may still write to the residuals.
        self.wait_for_operations()
        for bucket_exchange in self.bucket_exchanges:
            bucket_exchange.undo()
        self._invalid = True

    def drop(self) -> None:
        """Undo what was exchanged; wait for what is still on its way first."""
        self.wait_for_operations()
        self.undo()

    def undo(self) -> None:
        """Undo what was exchanged; all submitted operations must have ended."""
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
        """Tell whether gradients were handed over before they were computed, as on a GPU."""
        return any(each.ready_at is not None for each in self.exchanged.values())

    def finite(self) -> bool:
        """Tell whether the transaction has an update to apply."""
        return not self._stopped and all(each.finite for each in self.exchanged.values())

    def apply(self) -> None:
        """Replace the gradients by the agreed update; until `commit`, `undo` takes it back."""
        for index, bucket_exchange in enumerate(self.bucket_exchanges):
            bucket_exchange.apply(self._missing_everywhere[index])
        self._applied = [
            (parameter, parameter._version, weakref.ref(gradient))
            for bucket_exchange in self.bucket_exchanges
            for parameter in bucket_exchange.parameters
            if (gradient := parameter.grad) is not None
        ]

    def commit(self) -> None:
        """Make the update final: it cannot be undone any more."""
        for bucket_exchange in self.bucket_exchanges:
            bucket_exchange.commit()

    @property
    def has_changed_parameters(self) -> bool:
        """Tell whether a parameter has changed since the update was applied, by any optimizer.

        Only changes that torch counts: not those by `.data`.
        """
        return any(parameter._version != version for parameter, version, _ in self._applied)

    @property
    def is_discarded(self) -> bool:
        """Tell whether the gradients that hold the update are gone from all parameters."""
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
        """Return the work for a bucket of a rank that has joined.

        The work sends the residual alone; parameters stay as they are. It returns whether the
        transaction has ended with an update.
        """
        self.shadowed.add(index)
        self.bucket_exchanges[index].capture_zeros(self._scale_of(self.bucket_exchanges[index]))

        def work(transport: Transport, all_flags: list[int]) -> bool:
            self._work(index, [], transport, all_flags)
            # The last bucket ends the transaction: only then does this rank know whether it counts.
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
                if (gradient := parameter.grad) is None or lacks_gradient(parameter):
                    continue
                (gradient._values() if gradient.is_sparse else gradient.detach()).zero_()
        scale = self._scale_of(bucket_exchange)
        bucket_exchange.capture_gradients(self._weight / scale, scale)
        if bucket_exchange.checks_finite_first and not bucket_exchange.all_finite():
            self._not_finite = NOT_FINITE

    def _scale_of(self, bucket_exchange: AnyBucketExchange) -> float:
        # A residual may be resumed in a run, or a bucket, with another predivide factor.
        return self._scale if bucket_exchange.has_residual else self._scale * self._predivide

    def _submit(self, index: int, bits: int) -> None:
        bucket_exchange = self.bucket_exchanges[index]
        missing = bucket_exchange.missing()
        checksum = zlib.crc32("\n".join(missing).encode()) >> 3
        # The names as a checksum: flags have 35 bits for all of this. Where the checksums differ,
        # the ranks exchange the names (`_check_missing`).
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
        """Reduce a bucket on the engine's thread; buckets come in the same order on every rank."""
        begun = time.perf_counter()
        try:
            self._reduce(index, missing, transport, all_flags)
            self._done += 1
        # A disagreement is raised on all ranks alike: no rank exchanges the buckets after it.
        except BaseException:
            self._stopped = True
            raise
        finally:
            self.spans.append((begun, time.perf_counter()))

    def _reduce(
        self, index: int, missing: list[str], transport: Transport, all_flags: list[int]
    ) -> None:
        last = index == len(self.bucket_exchanges) - 1
        # Before any return: all ranks learn of SIGTERM in the same try, also in a void one.
        if last:
            places = enumerate(all_flags)
            self.preempted = [transport.ranks[n] for n, flags in places if flags & PREEMPTED]
        self.changed |= any(flags & _CHANGED for flags in all_flags)
        self.unplanned |= any(flags & _UNPLANNED for flags in all_flags)
        # Where all ranks have aborted, the last bucket may be run before others.
        self.aborted |= any(flags & _ABORTED for flags in all_flags)
        # All from flags and sums that are the same on all ranks: all return, or none. One rank that
        # returned alone would leave the others waiting in the exchange below.
        if self.void or (self._stopped and not last):
            return
        if last and self._done < index:  # the ranks disagree about another bucket
            return
        bucket_exchange = self.bucket_exchanges[index]
        self._check_missing(index, missing, transport, all_flags)
        self._stopped |= any(flags & NOT_FINITE for flags in all_flags)
        if not self._stopped:
            # A rank that has joined has no gradient, even if its last sample count was not 0.
            if self.samples.count is not None and all_flags[transport.rank] & _HERE:
                weight, share = self.samples.weight(all_flags), self.samples.share(all_flags)
                factor = weight * self.clip.factor(weight, share)
                bucket_exchange.set_weight(factor / self._scale_of(bucket_exchange), share)
            # First, so that `undo` also takes back what the next lines change in the residual.
            bucket_exchange.snapshot()
            if missing_everywhere := self._missing_everywhere[index]:
                bucket_exchange.exclude(missing_everywhere)
            self.exchanged[index] = bucket_exchange.reduce(transport)
            # Ranks may not have looked at their gradients: the sum, the same on all ranks, tells.
            self._stopped = not self.exchanged[index].finite
        if self._stopped and last:
            mine = sorted(name for each in self.bucket_exchanges for name in each.not_finite())
            said = zip(transport.ranks, transport.gather_object(mine), strict=True)
            self.culprits = {rank: names for rank, names in said if names}

    def _check_missing(
        self, index: int, missing: list[str], transport: Transport, all_flags: list[int]
    ) -> None:
        # Where all checksums agree, as they mostly do, all ranks lack what this one lacks.
        everywhere = set(missing)
        here = [rank for rank, flags in enumerate(all_flags) if flags & _HERE]
        checksums = {all_flags[rank] & _MISSING for rank in here}
        # A rank that has joined has no gradients by which to know what all the others lack.
        joined_unaware = len(here) < len(all_flags) and any(checksums)
        if len(checksums) > 1 or joined_unaware:
            said = transport.gather_object(missing)
            # Without those that have no samples, and so no gradients by right.
            heard = {transport.ranks[r]: said[r] for r in here if is_weighted(all_flags[r])}
            if len(set(map(tuple, heard.values()))) > 1:
                if not self._missing_is_zero:
                    raise MismatchError(
                        "the ranks disagree about which parameters have a gradient: "
                        f"{describe_missing(heard)}; use the same parameters on every rank, or "
                        "leave out missing_gradients='error'"
                    )
                self.lacking = self.lacking or heard
            everywhere = set.intersection(*(set(said[rank]) for rank in here))
        self._missing_everywhere[index] = everywhere


def _dereference(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor if it still exists, as torch's TensorWeakRef does; that is slow to make."""
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensor
