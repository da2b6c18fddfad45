"""OneStep: all buckets of a step count, or none, where DDP or FSDP hands them over one by one."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from collectives.ranges import profiled
from collectives.transports import Transport

from ..exchange.bucket_exchange import BucketExchange
from ..exchange.exchange import Exchanged

# Flags of a bucket; NOT_FINITE also of the end of a pass.
NOT_FINITE: Final = 1  # this rank's gradients are not finite
PREEMPTED: Final = 2  # this rank had SIGTERM
# Further flags of the end of a pass.
VOID: Final = 2  # the pass does not count
SPOILT: Final = 4  # some gradients are still the NaN that an earlier pass made of them
CLEARED: Final = 8  # some of those gradients were cleared since


def flags_of(bucket_exchange: BucketExchange) -> int:
    """Return NOT_FINITE where this rank's gradients are not; 0 where the exchange finds that."""
    return (
        NOT_FINITE
        if bucket_exchange.checks_finite_first and not bucket_exchange.all_finite()
        else 0
    )


class OneStep:
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
        self._void |= any(flags & NOT_FINITE for flags in all_flags)
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


def is_void(all_flags: Sequence[int]) -> bool:
    """Tell whether a pass is void, from all ranks' flags.

    It is where a rank says VOID, or where gradients were added to an earlier pass's NaN and none
    was cleared. If some were cleared, the rest belong to no optimizer and stay NaN; they void no
    further pass.
    """
    said = functools.reduce(operator.or_, all_flags)
    return bool(said & VOID) or said & (SPOILT | CLEARED) == SPOILT
