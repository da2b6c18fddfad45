"""View: some of the ranks, or a stream of messages of its own, as a transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..cost import Link
from ..vector import Array
from .counter import Counter
from .departure import DepartureNotice
from .node_memory import NodeMemory
from .pacing import Clock
from .streams import Streams
from .traffic import Traffic
from .transport import Path, Step, Transport


class View(Transport):
    """A part of what a carrier carries.

    Its traffic is its own; what it sends counts for the transport it was made from, too. The job is
    the carrier's: to announce a departure, leave or abort here is to do so there.
    """

    def __init__(
        self, carrier: Streams, parent: Transport, path: Path, ranks: Sequence[int], tag: int
    ) -> None:
        rank = ranks.index(carrier.rank)
        super().__init__(ranks, rank, path, tag, Traffic(parent=parent.traffic))
        self.name = carrier.name
        self.timeout_seconds = carrier.timeout_seconds
        self.announces_waits = carrier.announces_waits
        self.supports_device_messages = carrier.supports_device_messages
        self._carrier = carrier
        self._parent = parent

    @property
    def activity(self) -> str:
        return self._activity or self._parent.activity

    @property
    def begun(self) -> int:
        return self._begun if self._activity else self._parent.begun

    @property
    def checks_messages(self) -> bool:
        return self._carrier.checks_messages

    def check_messages(self) -> None:
        self._carrier.check_messages()

    @property
    def link(self) -> Link | None:
        return self._carrier.link

    def emulate(self, link: Link, clock: Clock | None = None) -> None:
        self._carrier.emulate(link, clock)

    def send(self, message: Array, to: int) -> Callable[[], None]:
        return self._carrier.send_from(self, message, self.ranks[to])

    def receive(self, source: int) -> Array:
        return self._carrier.receive_for(self, self.ranks[source])

    def conclude(self) -> None:
        self._carrier.conclude_on(self)

    def view(self, step: Step, ranks: Sequence[int]) -> Transport:
        return self._carrier.view_of(self, step, ranks)

    def misses(self, rank: int, notice: DepartureNotice) -> bool:
        return super().misses(rank, notice) or self._parent.misses(rank, notice)

    def departures(self) -> Mapping[int, DepartureNotice]:
        return self._carrier.departures()

    def collect_departures(self) -> None:
        self._carrier.collect_departures()

    def announce_departure(self, reason: str) -> None:
        self._carrier.announce_departure(reason)

    def leave(self, reason: str, leave_timeout_seconds: float | None = None) -> list[int]:
        return self._carrier.leave(reason, leave_timeout_seconds)

    def lose(self, rank: int, reason: str) -> None:
        self._carrier.lose(rank, reason)

    def abort(self, exit_code: int, reason: str = "") -> None:
        self._carrier.abort(exit_code, reason)

    def neighbours(self) -> list[int]:
        here = set(self._carrier.neighbours())
        return [place for place, rank in enumerate(self.ranks) if rank in here]

    def counter(self) -> Counter:
        return self._carrier.counter_on(self)

    def shared_memory(self, size_bytes: int) -> NodeMemory:
        return self._carrier.shared_memory_on(self, size_bytes)

    def library(self) -> str:
        return self._carrier.library()
