"""Operation: something all ranks do together, and its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from collectives.errors import CollectiveError, PeerTimeoutError
from collectives.transports import Traffic, Transport

from ..exceptions import HorovodInternalError
from ..fusion import Dense, layout_of
from .saying import Intention

# What an operation does: it gets the transport and every rank's vote, in rank order.
Work = Callable[[Transport, list[int]], Any]

# What a rank that has joined does for the others' operation, from its name and recipe.
StandIn = Callable[[str, bytes], Work]


class Operation:
    """Something all ranks do together, and its outcome.

    queue_seconds: how long it waited for the operations before it, here.
    agree_seconds: how long this rank took, and waited, to hear that all are ready.
    traffic:       what this rank sent for it. Arrays that are reduced as one count for the first of
                   them, and a cycle for the first operation that is run after it.
    """

    def __init__(
        self,
        name: str,
        facts: Sequence[str],
        vote: int,
        work: Work,
        recipe: bytes | None = None,
        fusion: Sequence[Dense] = (),
        hurry: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        self.name = name
        self.intention = Intention(tuple(facts), recipe, tuple(map(layout_of, fusion)))
        self.vote = vote
        self.work = work
        self.fusion = fusion
        self.submitted = time.perf_counter()
        self.said = self.agreed = self.submitted
        self.queue_seconds = 0.0
        self.agree_seconds = 0.0
        self.traffic = Traffic()
        self.result: Any = None
        self.error: BaseException | None = None
        self._hurry = hurry
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._finished.is_set()

    def wait(self) -> Any:
        """Return the result, or raise HorovodInternalError (or what `work` raised)."""
        if not self._finished.is_set():
            self._hurry(self)
            self._finished.wait()
        if isinstance(self.error, PeerTimeoutError):
            raise HorovodInternalError(
                f"{self.error}; a larger GTOPK_TIMEOUT (seconds) waits longer"
            ) from None
        if isinstance(self.error, CollectiveError):
            raise HorovodInternalError(str(self.error)) from None
        if self.error is not None:
            raise self.error
        return self.result

    def begin(self) -> None:
        """Note that it is its turn."""
        self.agree_seconds = self.agreed - self.said
        self.queue_seconds = time.perf_counter() - self.submitted - self.agree_seconds

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome."""
        self.result, self.error = result, error
        self._finished.set()
