"""Recorder: a rank of a world of threads that notes what it sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..vector import Array
from .counter import Counts
from .farewell import Farewell
from .local import LocalTransport
from .mailbox import Mailbox
from .transport import Transport

# A peer, and the bytes of a message to it; RECEIVED where one came from it.
Event = tuple[int, int]
RECEIVED: Final = -1


class Recorder(LocalTransport):
    """Notes all messages of a rank, those of its views included; events: in their order."""

    def __init__(
        self,
        rank: int,
        mailboxes: Sequence[Mailbox],
        left: dict[int, Farewell],
        counts: Counts,
        node_size: int,
    ) -> None:
        super().__init__(rank, mailboxes, left, counts, node_size)
        self.events: list[Event] = []

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        self.events.append((to, message.nbytes))
        return super().send_on(stream, message, to)

    def receive_on(self, stream: Transport, source: int) -> Array:
        message = super().receive_on(stream, source)
        self.events.append((source, RECEIVED))
        return message
