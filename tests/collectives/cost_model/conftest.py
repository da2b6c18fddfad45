"""A world of threads with modelled message times: it advances clocks instead of waiting."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
import pytest

from collectives.cost import Link, dense_bytes, rounds
from collectives.transports import LocalTransport, Transport, local_world


class VirtualWorld:
    """Ranks with a virtual clock each, on nodes of `ranks_per_node`.

    A message leaves its sender after the previous one, takes latency + bytes * seconds per byte,
    waits while the receiver's link is busy, and advances the receiver's clock to its arrival. Bytes
    covered by the sender's token bucket take no time. A receive costs `call_seconds`.
    """

    def __init__(
        self,
        size: int,
        between: Link,
        within: Link | None = None,
        ranks_per_node: int = 1,
        call_seconds: float = 0.0,
    ) -> None:
        self.world = local_world(size, timeout_seconds=30)
        self.seconds = [0.0] * size
        self.between, self.within, self.ranks_per_node = between, within, ranks_per_node
        self.call_seconds = call_seconds
        self._gone = [0.0] * size  # when a rank's last message was sent
        self._come = [0.0] * size  # when the last message to a rank arrived
        self._buckets = [between.burst_bytes] * size
        self._flights: dict[tuple[int, int, int], deque[tuple[float, float]]] = defaultdict(deque)
        for transport in self.world:
            self._slow_down(transport)

    def link(self, a: int, b: int) -> Link:
        same = a // self.ranks_per_node == b // self.ranks_per_node
        return self.within if same and self.within is not None else self.between

    def clock(self, rank: int) -> Callable[[], float]:
        """Return the clock of a rank."""
        return lambda: self.seconds[rank]

    def reduce_natively(self, link: Link, native_bytes: int = 0) -> None:
        """Make allreduces of at least `native_bytes` take the time of their messages on a link."""
        for transport in self.world:
            self._reduce_natively(transport, link, native_bytes)

    def _reduce_natively(self, transport: LocalTransport, link: Link, native_bytes: int) -> None:
        size, by_messages = len(self.world), transport.allreduce

        def allreduce(array: np.ndarray, reduction: str = "sum") -> None:
            if array.nbytes < native_bytes:
                by_messages(array, reduction)
                return
            sent_bytes = dense_bytes(array.size, size, array.itemsize)
            seconds = 2 * rounds(size) * link.latency_seconds + sent_bytes * link.seconds_per_byte
            self.seconds[transport.rank] += seconds

        transport.allreduce, transport.native_bytes = allreduce, lambda: native_bytes

    def _beyond_bucket(self, rank: int, size: int, begun: float, link: Link) -> float:
        """Take a message's bytes from its sender's bucket; return the bytes that exceed it.

        First refill the bucket for the time since the last message was sent.
        """
        if not link.burst_bytes:
            return size
        filled = (begun - self._gone[rank]) / link.seconds_per_byte
        held = min(link.burst_bytes, self._buckets[rank] + filled)
        self._buckets[rank] = max(0.0, held - size)
        return max(0.0, size - held)

    def _slow_down(self, transport: LocalTransport) -> None:
        rank, send, receive = transport.rank, transport.send_on, transport.receive_on
        first = rank // self.ranks_per_node * self.ranks_per_node
        size = len(self.world)

        def neighbours() -> list[int]:
            return list(range(first, min(first + self.ranks_per_node, size)))

        def slow_send(stream: Transport, message: np.ndarray, to: int) -> Callable[[], None]:
            link = self.link(rank, to)
            begun = max(self.seconds[rank], self._gone[rank])
            taken = self._beyond_bucket(rank, message.size, begun, link) * link.seconds_per_byte
            self._gone[rank] = begun + taken
            self._flights[stream.tag, rank, to].append((begun + link.latency_seconds, taken))
            return send(stream, message, to)

        def slow_receive(stream: Transport, source: int) -> np.ndarray:
            message = receive(stream, source)
            first_byte, taken = self._flights[stream.tag, source, rank].popleft()
            self._come[rank] = max(first_byte, self._come[rank]) + taken
            self.seconds[rank] = max(self.seconds[rank], self._come[rank]) + self.call_seconds
            return message

        transport.send_on, transport.receive_on = slow_send, slow_receive
        transport.neighbours = neighbours


@pytest.fixture
def virtual() -> type[VirtualWorld]:
    """Return the class of worlds with virtual time."""
    return VirtualWorld
