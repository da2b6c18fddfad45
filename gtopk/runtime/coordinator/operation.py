"""Operation: something all ranks do together, and its outcome.

Observer: what the engine tells while it works, for a timeline.

    engine.observe(observer)      observer(event) is called in the engine's thread: be quick
    engine.ignore(observer)

An operation, from the first rank that is ready for it:

    begin negotiate  name         some rank is ready, this one or another
    mark  ready      name, rank   which one; once for each rank
    end   negotiate  name         all are (or it failed: then nothing is executed)
    begin execute    name
    begin copy-in    name         only of dense arrays that are reduced as one: into the buffer
    end   copy-in    name
    begin reduce     name         only of dense arrays
    end   reduce     name
    begin copy-out   name         as copy-in
    end   copy-out   name
    end   execute    name
    mark  cycle      ""           all ranks have said what they are ready for

Arrays that are reduced as one begin and end each of these at the same time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from collectives.errors import CollectiveError, PeerTimeoutError
from collectives.transports import Traffic, Transport

from ...errors import HorovodInternalError
from .announcement import ReadyName
from .fusion import Dense

Phase = Literal["begin", "end", "mark"]
What = Literal["negotiate", "ready", "execute", "copy-in", "reduce", "copy-out", "cycle"]


class Event(NamedTuple):
    """Something the engine did.

    seconds: on the clock of time.perf_counter.
    rank:    in the world; only of "ready".
    """

    phase: Phase
    what: What
    name: str
    seconds: float
    rank: int | None = None


Observer = Callable[[Event], None]


# What an operation does: it gets the transport and every rank's flags, in rank order.
Work = Callable[[Transport, list[int]], Any]

# What a rank that has joined does for the others' operation, from its name and join descriptor.
StandIn = Callable[[str, bytes], Work]


class Operation:
    """Something all ranks do together, and its outcome.

    ranks:         how many they are.
    queue_seconds: how long it waited for the operations before it, here.
    agree_seconds: how long this rank took, and waited, to hear that all are ready.
    traffic:       what this rank sent for it. Arrays that are reduced as one count for the first of
                   them, and a cycle for the first operation that is run after it.
    """

    def __init__(
        self,
        ready_name: ReadyName,
        ranks: int,
        work: Work,
        fusion: Sequence[Dense],
        hurry: Callable[[Operation], threading.Event | None],
        where: Callable[[], str],
    ) -> None:
        """hurry: tells the engine that somebody waits; returns what to wait for.

        where: says at which step this rank is.
        """
        self.name = ready_name.name
        self.ready_name = ready_name
        self.ranks = ranks
        self.work = work
        self.fusion = fusion
        self.submitted = self.said = self.agreed = time.perf_counter()
        self.queue_seconds = self.agree_seconds = 0.0
        self.done = False  # whether `wait` would return at once
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished: threading.Event | None = None  # made for the first that waits
        self._hurry = hurry
        self._where = where
        self._traffic: Traffic | None = None

    @property
    def traffic(self) -> Traffic:
        if self._traffic is None:
            self._traffic = Traffic()
        return self._traffic

    def wait(self) -> Any:
        """Return the result, or raise HorovodInternalError (or what `work` raised)."""
        if not self.done and (finished := self._hurry(self)):
            finished.wait()
        if isinstance(self.error, CollectiveError):
            raise self._failure(self.error) from None
        if self.error is not None:
            raise self.error
        return self.result

    def _failure(self, error: CollectiveError) -> HorovodInternalError:
        """Return what the script is told, with the step where the text has it not already."""
        text, where = str(error), self._where()
        if isinstance(error, PeerTimeoutError):
            text += "; a larger GTOPK_TIMEOUT (seconds) waits longer"
        elif self.name not in text:
            text += f"; '{self.name}' cannot be done"
        if where and not re.search(rf"{re.escape(where)}\b", text):
            text += f"; {where}"
        failure = HorovodInternalError(text)
        failure.operation = self.name
        return failure

    def begin(self) -> None:
        """Note that it is its turn."""
        self.agree_seconds = self.agreed - self.said
        self.queue_seconds = time.perf_counter() - self.submitted - self.agree_seconds

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome, and let go of all else; the engine's lock is held."""
        self.result, self.error = result, error
        self.work, self.fusion = _nothing, ()
        self.done = True
        if self.finished is not None:
            self.finished.set()


def _nothing(transport: Transport, all_flags: list[int]) -> None:
    """Stand for the work that is done."""
