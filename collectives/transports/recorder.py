"""Recorder: a rank of a world of threads that notes what it sends and receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from ..vector import Array
from .counters import Counts
from .departure import DepartureNotice
from .local import LocalTransport
from .mailbox import Mailbox
from .transport import Transport

# A peer, and the bytes of a message to it; RECEIVED where one came from it.
Event = tuple[int, int]
RECEIVED: Final = -1


class Recorder(LocalTransport):
    """Notes all messages of a rank, those of its views included.

    events:   in their order.
    computed: seconds of its thread's processor time before each event, since the one before.
    """

    def __init__(
        self,
        rank: int,
        mailboxes: Sequence[Mailbox],
        left: dict[int, DepartureNotice],
        counts: Counts,
        node_size: int,
    ) -> None:
        super().__init__(rank, mailboxes, left, counts, node_size)
        self.events: list[Event] = []
        self.computed: list[float] = []
        self._since = 0.0

    def begin(self) -> None:
        """Clear the record; call it in the thread whose events follow."""
        self.events.clear()
        self.computed.clear()
        self._since = time.thread_time()

    def computed_since(self) -> float:
        """Return the seconds since the last event, and reset them."""
        since, self._since = self._since, time.thread_time()
        return self._since - since

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        self.computed.append(self.computed_since())
        self.events.append((to, message.nbytes))
        return super().send_on(stream, message, to)

    def receive_on(self, stream: Transport, source: int) -> Array:
        self.computed.append(self.computed_since())
        message = super().receive_on(stream, source)
        self._since = time.thread_time()  # waiting does not count as computing
        self.events.append((source, RECEIVED))
        return message
