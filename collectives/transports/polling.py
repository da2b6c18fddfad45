"""Waits for a peer: each ends with its message, when it has left, and after a timeout.

`wait_until` polls until a condition holds: it spins with sched_yield, backs off, times out. A
thread that waits at a `Mailbox` sleeps until a message is put there, or a rank has left.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from ..errors import PeerError, PeerTimeoutError
from ..vector import Array
from .transport import STALL_WARNING_SECONDS, Transport, print_line

T = TypeVar("T")

_SPINS: Final = 200  # tests that only yield, about 0.1 ms, before a wait begins to sleep
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 20e-6, 500e-6
_LOOK_SECONDS: Final = 0.01  # how often a waiting rank looks whether a peer has left


def wait_until(
    test: Callable[[], T | None],
    transport: Transport,
    peers: Sequence[int],
    timeout_seconds: float,
    look: Callable[[], None] = lambda: None,
    grace_seconds: float = 0.0,
) -> T:
    """Call `test` until its result is not None, and return that; count the wait.

    peers: the world ranks that are waited for; empty: all of them.
    look:  called now and then; may raise.
    grace_seconds: how long messages of a peer may arrive after it left; there is at least one test
           after its departure notice.
    Raises PeerError when a peer left, PeerTimeoutError when nothing happens.
    """
    if (result := test()) is not None:
        return result
    begun = time.monotonic()
    needed: Sequence[int | None] = peers or [None]
    who = " and ".join(f"rank {peer}" for peer in peers) or "its peers"
    next_look = begun + _LOOK_SECONDS
    next_warning = begun + STALL_WARNING_SECONDS
    missed_since: float | None = None
    sleep_seconds = _SHORTEST_SLEEP_SECONDS
    spins = 0
    try:
        while (result := test()) is None:
            spins += 1
            # On busy cores a yield takes milliseconds: spinning must not delay the first look.
            if spins < _SPINS and time.monotonic() < next_look:
                os.sched_yield()
                continue
            time.sleep(sleep_seconds)
            sleep_seconds = min(sleep_seconds * 1.3, _LONGEST_SLEEP_SECONDS)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + _LOOK_SECONDS
            look()
            transport.collect_departures()
            missing = [text for text in map(transport.missing, needed) if text]
            if not missing:
                # A false alarm: what was waited for has come. The next loss gets the whole grace.
                missed_since = None
            else:
                missed_since = missed_since or now
                # Not at the first look: `test` runs once more, for what the peer sent before it
                # left.
                if now > missed_since + grace_seconds:
                    raise PeerError(missing[0])
            waiting = (
                f"rank {transport.ranks[transport.rank]} has waited {now - begun:.0f} s for {who} "
                f"in {transport.activity}"
            )
            if now - begun > timeout_seconds:
                raise PeerTimeoutError(waiting)
            if now > next_warning:
                next_warning = now + STALL_WARNING_SECONDS
                print_line(waiting)
        return result
    finally:
        transport.traffic.count_wait(time.monotonic() - begun)


def wait_for_call(call: Callable[[], T], wait: Callable[[Callable[[], Any]], Any]) -> T:
    """Run a call that may block in another thread, which is abandoned if `wait` raises.

    wait: calls a test until its result is not None and returns that, or raises.
    """
    made = call_in_thread(call)
    # A list, as the call may return None.
    result: list[T] = wait(lambda: [made.result()] if made.done() else None)
    return result[0]


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call that may never end in a thread of its own; return its result to come."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    # A daemon: an abandoned call may never end, and must not keep the process.
    threading.Thread(target=run, name="gtopk-call", daemon=True).start()
    return made


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
        box = self._box(tag, source)
        begun = time.monotonic()
        warning_seconds = STALL_WARNING_SECONDS if stream.announces_waits else math.inf
        next_warning = begun + warning_seconds
        deadline = begun + self.timeout_seconds
        # Entered before `missing` is read: a rank that leaves in between puts its wake into the
        # box.
        self._waited_for[box] = None
        try:
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
                    # None is a wake, maybe one left over from an earlier wait: it only costs
                    # another look.
                    if message is not None:
                        return message
                now = time.monotonic()
                rank = stream.ranks[stream.rank]
                waited = f"rank {rank} has waited {now - begun:.3g} s"
                waiting = f"{waited} for {who} in {stream.activity}"
                if now >= deadline:
                    raise PeerTimeoutError(waiting)
                if now >= next_warning:
                    next_warning = now + warning_seconds
                    print_line(waiting)
        finally:
            del self._waited_for[box]
            stream.traffic.count_wait(time.monotonic() - begun)

    def _box(self, tag: int, source: int) -> _Box:
        try:
            return self._boxes[tag, source]
        except KeyError:
            # In one operation: of two threads' boxes one would be lost, and a message with it.
            return self._boxes.setdefault((tag, source), queue.SimpleQueue())
