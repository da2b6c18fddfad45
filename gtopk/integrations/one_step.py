"""OneStep: buckets that somebody else hands over one by one; all of a step count, or none."""

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

NOT_FINITE: Final = 1  # flags: this rank's gradients of the bucket are not
PREEMPTED: Final = 2  # this rank had SIGTERM
# At the end of a pass: it does not count; of the gradients that the last one made NaN, some are so
# yet; some are not.
VOID: Final = 2
SPOILT: Final = 4
CLEARED: Final = 8


def flags_of(bucket_exchange: BucketExchange) -> int:
    """Return what this rank says of its gradients; nothing where the exchange will."""
    return NOT_FINITE if bucket_exchange.looks_first and not bucket_exchange.all_finite() else 0


class OneStep:
    """Exchanges the buckets of a step; undoes them all where a gradient or a sum is not finite.

    A bucket that is back cannot be called back: it is the NaN in the one that failed, and in all
    that follow it, that tells who steps with them to skip, and with those before it, too. The
    residual is then, to the bit, what it was before the step.

    not_finite: the places of the ranks whose gradients of the last bucket were not finite, though
        they had not said so: the exchange tells. The same on all ranks.
    """

    def __init__(self) -> None:
        self.not_finite: list[int] = []
        self._ran: list[BucketExchange] = []
        self._void = False

    def run(
        self, bucket_exchange: BucketExchange, transport: Transport, all_flags: Sequence[int]
    ) -> Exchanged | None:
        """Replace a bucket's gradients by what all ranks agreed on, or by NaN.

        Returns what the exchange did, applying included; None where there was none.
        """
        again = (
            bucket_exchange in self._ran
        )  # a module that is used twice: what was before the step counts
        self._ran.append(bucket_exchange)
        self.not_finite = []
        self._void |= any(flags & NOT_FINITE for flags in all_flags)
        exchanged = None
        if not self._void:
            if not again:
                bucket_exchange.remember()
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
        for bucket_exchange in self._ran:
            bucket_exchange.undo()

    @property
    def is_void(self) -> bool:
        """Whether the step does not count."""
        return self._void

    @property
    def buckets(self) -> int:
        """How many were exchanged."""
        return len(self._ran)

    def close(self) -> bool:
        """Begin another step, and tell whether the last one counted."""
        counted = not self._void
        for bucket_exchange in self._ran:
            bucket_exchange.let_go()
        self._ran, self._void = [], False
        return counted


def is_void(all_flags: Sequence[int]) -> bool:
    """Tell whether a pass does not count, as one does not that was added to NaN.

    What a program never clears, as it is in no optimizer, is NaN for good, and costs no more steps.
    """
    said = functools.reduce(operator.or_, all_flags)
    return bool(said & VOID) or said & (SPOILT | CLEARED) == SPOILT
