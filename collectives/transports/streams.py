"""Streams: a transport that carries the messages of its views beside its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from ..vector import Array
from .checksum import append_checksum, strip_checksum
from .counter import Counter
from .node_memory import NodeMemory
from .pacing import STAMP_BYTES, Pacer, append_stamp, split_stamp
from .sharing import open_shared_memory
from .transport import Step, Transport


class Streams(Transport):
    """The interface of a transport to the views on it.

    `send_on` and `receive_on` are called by one thread per stream, and by the threads of several
    streams at once.
    """

    @property
    def pacer(self) -> Pacer | None:
        """This rank's end of the emulated link; None: messages are not paced."""
        return None

    def send_from(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        """Send a message on a stream as `send_on` does; checked or paced."""
        if self.checks_messages:
            message = append_checksum(message)
        pacer = self.pacer
        if pacer is None or to == self.rank:
            return self.send_on(stream, message, to)
        begins, is_gone_at = pacer.leave(message.size)
        # Outside of the checksum: the receiver takes the stamp off first, and the checksum last.
        sent = self.send_on(stream, append_stamp(message, begins), to)
        stream.traffic.count(-STAMP_BYTES, 0)  # no network would carry it

        def finish() -> None:
            sent()
            self._await(pacer, stream, is_gone_at)

        return finish

    def receive_for(self, stream: Transport, source: int) -> Array:
        """Return the next message of a stream as `receive_on` does; checked or paced."""
        message = self.receive_on(stream, source)
        if self.pacer is not None and source != self.rank:
            message, begins = split_stamp(message, source)
            self._await(self.pacer, stream, self.pacer.arrive(begins, message.size))
        return strip_checksum(message, source) if self.checks_messages else message

    def _await(self, pacer: Pacer, stream: Transport, at: float) -> None:
        stream.traffic.count_wait(max(0.0, at - pacer.clock.now()))
        pacer.clock.wait_until(at, self.progress)

    def progress(self) -> None:
        """Advance messages, where the library only does so while it is called."""

    @abstractmethod
    def send_on(self, stream: Transport, message: Array, to: int) -> Callable[[], None]:
        """Begin to send a message to a world rank, in the order of its stream; as `send`.

        Counts it in the stream's traffic.
        """

    @abstractmethod
    def receive_on(self, stream: Transport, source: int) -> Array:
        """Return the next message that a world rank sent on this stream; as `receive`.

        Looks at `stream.missing(source)` while it waits; counts the wait in the stream's traffic.
        """

    def conclude_on(self, stream: Transport) -> None:
        """`conclude` a stream's operation; nothing is to be done where what was sent arrives."""

    @abstractmethod
    def view_of(self, parent: Transport, step: Step, ranks: Sequence[int]) -> Transport:
        """Return the view one step on from a parent; as `view`."""

    def counter_on(self, stream: Transport) -> Counter:
        """Return a new counter of a stream's ranks, all of which call this; as `counter`."""
        raise ValueError(
            f"the transport {self.name!r} has no number that its ranks share; start them with "
            "mpirun and mpi4py, or with torchrun"
        )

    def shared_memory_on(self, stream: Transport, size_bytes: int) -> NodeMemory:
        """Return new zeros that a stream's ranks map; as `shared_memory`."""
        return open_shared_memory(stream, size_bytes)
