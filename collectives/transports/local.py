"""The transport between threads of one process: for tests, teaching, and a single-rank world."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from ..errors import CollectiveError, PeerError
from ..vector import Array
from .carrier import Carrier, Mailbox
from .counters import LocalCounter
from .departure import DepartureNotice
from .transport import Transport

T = TypeVar("T")


class LocalTransport(Carrier):
    """One rank of a world of threads; messages are copied, as a network would do."""

    name = "local"

    def __init__(
        self,
        rank: int,
        mailboxes: Sequence[Mailbox],
        left: dict[int, DepartureNotice],
        counters: dict[str, LocalCounter],
        node_size: int,
    ) -> None:
        super().__init__(rank, len(mailboxes))
        first = rank // node_size * node_size
        self._node = range(first, min(first + node_size, self.size))
        self._shared_counters = counters  # shared by all ranks
        self._mailboxes, self.mailbox = mailboxes, mailboxes[rank]
        self.timeout_seconds = mailboxes[rank].timeout_seconds
        self._left = left  # shared by all ranks
        self.supports_device_messages = self.size == 1  # a single rank has no messages

    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        self._mailboxes[to].put(stream.tag, self.rank, np.array(message))
        return lambda: None  # the message has been copied

    def announce_departure(self, reason: str) -> None:
        # Before the wake: a woken thread reads the notices, and sleeps again if it finds no new
        # one.
        self._left.setdefault(self.rank, self.departure_notice(reason))
        self._wake()

    def _wake(self) -> None:
        for mailbox in self._mailboxes:
            mailbox.wake()

    def abort(self, exit_code: int, reason: str = "") -> None:
        os._exit(exit_code)

    def neighbours(self) -> list[int]:
        return list(self._node)

    def counter_on(self, stream: Transport) -> LocalCounter:
        # Atomic: otherwise one of two threads' counters would be lost.
        return self._shared_counters.setdefault(self.name_counter(stream), LocalCounter())

    def own_library(self) -> str:
        return "threads of one process"


def local_world(
    size: int,
    timeout_seconds: float = 60.0,
    node_size: int | None = None,
    kind: type[LocalTransport] = LocalTransport,
    announces_waits: bool = True,
) -> list[LocalTransport]:
    """Return the transports of a world of `size` ranks in this process, one per thread.

    node_size: how many of them are neighbours, like ranks on one host; None: all.
    kind: the class of each.
    announces_waits: whether to print long waits; use False with more ranks than cores.
    """
    if size < 1:
        raise ValueError(f"a world needs at least one rank, got size {size}")
    if node_size is not None and node_size < 1:
        raise ValueError(f"a node needs at least one rank, got node_size {node_size}")
    mailboxes = [Mailbox(timeout_seconds) for _ in range(size)]
    left: dict[int, DepartureNotice] = {}
    counters: dict[str, LocalCounter] = {}
    world = [kind(rank, mailboxes, left, counters, node_size or size) for rank in range(size)]
    for transport in world:
        transport.announces_waits = announces_waits
    return world


def run_ranks(
    transports: Sequence[LocalTransport], program: Callable[[LocalTransport], T]
) -> list[T]:
    """Run `program(transport)` on every rank, each in a thread; return the results by rank.

    If a rank raises, the others see it leave; the first exception is raised here.
    Raises CollectiveError if the system allows fewer threads than there are ranks.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def rank(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = program(transport)
        except BaseException as error:
            errors.append(error)
            transport.announce_departure(f"it raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=rank, args=(t,), daemon=True) for t in transports]
    started = 0
    try:
        for thread in threads:
            thread.start()
            started += 1
    except RuntimeError as error:  # threads already started would wait for the others
        reason = f"the system allows {started:,} of {len(threads):,} threads"
        errors.append(CollectiveError(f"{reason}, and each rank is one: {error}"))
        for transport in transports[started:]:
            transport.announce_departure(reason)
    for thread in threads[:started]:
        thread.join()
    if errors:
        # A rank's own error says more than its peers' errors about its absence.
        raise min(errors, key=lambda e: (isinstance(e, CollectiveError), isinstance(e, PeerError)))
    return [results[transport.rank] for transport in transports]
