"""Mailbox: the received messages of a rank, and the wait for the next one."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import PeerError, PeerTimeoutError
from ..vector import Array
from . import transport
from .transport import Transport, print_line

# The messages from one rank on one stream. None only wakes a waiting thread, as a rank has left.
_Box = queue.SimpleQueue["Array | None"]


class Mailbox:
    """Messages by stream and source, in order; several threads put, one thread per stream takes."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._boxes: dict[tuple[int, int], _Box] = {}
        self._waited_for: dict[_Box, None] = {}

    def put(self, tag: int, source: int, message: Array) -> None:
        """Add a message of a world rank to the stream with this tag."""
        self._box(tag, source).put(message)

    def wake(self) -> None:
        """Make waiting threads check again which ranks have left."""
        # A copy: other threads begin and end their waits meanwhile.
        for box in self._waited_for.copy():
            box.put(None)

    @property
    def has_waiters(self) -> bool:
        """Tell whether a stream waits for a message."""
        return bool(self._waited_for)

    def pop(self, stream: Transport, source: int) -> Array:
        """Return the next message of a world rank on a stream; count the wait in its traffic.

        Raises PeerError when a rank that is needed left, PeerTimeoutError when none did.
        """
        return self._pop(stream, stream.tag, source, f"rank {source}", source)

    def pop_reply(self, stream: Transport, tag: int) -> Array:
        """Return this rank's own message with this tag, put once all ranks took part."""
        return self._pop(stream, tag, stream.ranks[stream.rank], "its peers", None)

    def _pop(self, stream: Transport, tag: int, source: int, who: str, peer: int | None) -> Array:
        begun = time.monotonic()
        box = self._box(tag, source)
        try:
            # Entered before `missing` is read: a rank that leaves in between puts its wake into the
            # box.
            with self._waiting_for(box):
                return self._wait(box, stream, who, peer, begun)
        finally:
            stream.traffic.count_wait(time.monotonic() - begun)

    def _wait(
        self, box: _Box, stream: Transport, who: str, peer: int | None, begun: float
    ) -> Array:
        warning_seconds = transport.STALL_WARNING_SECONDS if stream.announces_waits else math.inf
        next_warning = begun + warning_seconds
        deadline = begun + self.timeout_seconds
        while True:
            # Read before the box: a rank that has left has sent all its messages before.
            missing = stream.missing(peer)
            remaining = min(next_warning, deadline) - time.monotonic()
            try:
                message = box.get(timeout=0 if missing else max(0.0, remaining))
            except queue.Empty:
                if missing:
                    raise PeerError(missing) from None
            else:
                # None is a wake, maybe one left over from an earlier wait: it only costs another
                # look.
                if message is not None:
                    return message
            now = time.monotonic()
            rank = stream.ranks[stream.rank]
            waiting = f"rank {rank} has waited {now - begun:.3g} s for {who} in {stream.activity}"
            if now >= deadline:
                raise PeerTimeoutError(waiting)
            if now >= next_warning:
                next_warning = now + warning_seconds
                print_line(waiting)

    def _box(self, tag: int, source: int) -> _Box:
        try:
            return self._boxes[tag, source]
        except KeyError:
            # In one operation: of two threads' boxes one would be lost, and a message with it.
            return self._boxes.setdefault((tag, source), queue.SimpleQueue())

    @contextmanager
    def _waiting_for(self, box: _Box) -> Iterator[None]:
        self._waited_for[box] = None
        try:
            yield
        finally:
            del self._waited_for[box]
