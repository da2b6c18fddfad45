"""Endpoint: a rank's connection for sending and receiving messages, without collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..vector import Array


class Endpoint(ABC):
    """The ranks, seen from one of them.

    rank, size: this rank's number among them, and how many there are.
    ranks:      their numbers in the world, which errors name.
    """

    rank: int
    size: int
    ranks: Sequence[int]

    @property
    def checks_messages(self) -> bool:
        """Whether every message travels with its checksum; the same on all ranks."""
        return False

    @abstractmethod
    def send(self, message: Array, to: int) -> Callable[[], None]:
        """Begin to send uint8 [m] to a rank; return the function that waits until it is gone.

        The message must stay unchanged until then.
        """

    @abstractmethod
    def receive(self, source: int) -> Array:
        """Return the next message of a rank, uint8 [m], in memory of its own.

        Raises PeerError when that rank left, PeerTimeoutError when it stays silent.
        """
