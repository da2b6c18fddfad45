"""Polling: wait until a condition holds, a peer has left, or a timeout.

`wait_until` spins with sched_yield, then backs off and sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from ..errors import PeerError, PeerTimeoutError
from .transport import STALL_WARNING_SECONDS, Transport, print_line

T = TypeVar("T")

_SPINS: Final = 200  # tests with only a yield (about 0.1 ms) before a wait starts to sleep
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 20e-6, 500e-6
_CHECK_SECONDS: Final = 0.01  # how often a waiting rank checks whether a peer has left


def wait_until(
    test: Callable[[], T | None],
    transport: Transport,
    peers: Sequence[int],
    timeout_seconds: float,
    on_check: Callable[[], None] = lambda: None,
    grace_seconds: float = 0.0,
) -> T:
    """Call `test` until its result is not None, and return that; count the wait.

    peers: the world ranks waited for; empty: all of them.
    on_check: called now and then; may raise.
    grace_seconds: how long messages from a peer may arrive after it left; at least one more test
           follows its departure notice.
    Raises PeerError if a peer has left, PeerTimeoutError after the timeout.
    """
    if (result := test()) is not None:
        return result
    begun = time.monotonic()
    needed: Sequence[int | None] = peers or [None]
    who = " and ".join(f"rank {peer}" for peer in peers) or "its peers"
    next_check = begun + _CHECK_SECONDS
    next_warning = begun + STALL_WARNING_SECONDS
    missed_since: float | None = None
    sleep_seconds = _SHORTEST_SLEEP_SECONDS
    spins = 0
    try:
        while (result := test()) is None:
            spins += 1
            # On busy cores a yield takes milliseconds: spinning must not delay the first check.
            if spins < _SPINS and time.monotonic() < next_check:
                os.sched_yield()
                continue
            time.sleep(sleep_seconds)
            sleep_seconds = min(sleep_seconds * 1.3, _LONGEST_SLEEP_SECONDS)
            now = time.monotonic()
            if now < next_check:
                continue
            next_check = now + _CHECK_SECONDS
            on_check()
            transport.collect_departures()
            missing = [text for text in map(transport.missing, needed) if text]
            if not missing:
                # False alarm: nobody needed is missing. The next loss gets the full grace period.
                missed_since = None
            else:
                missed_since = missed_since or now
                # Not at the first check: `test` must run once more, for messages that the peer sent
                # before it left.
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
    future = call_in_thread(call)
    # Wrapped in a list, as the call may return None.
    result: list[T] = wait(lambda: [future.result()] if future.done() else None)
    return result[0]


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call that may never end in a new thread; return a future for its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # A daemon thread: an abandoned call may never end, and must not keep the process alive.
    threading.Thread(target=run, name="gtopk-call", daemon=True).start()
    return future
