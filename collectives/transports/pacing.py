"""Pacing: every message takes as long as it would over a slow link.

A rank's link carries one message at a time in each direction. A message sent at time t waits until
the outbound link is free. Its end arrives once the inbound link has had time for all of it:

    first byte leaves    begins = max(t, last byte of the previous message)
    last byte leaves     begins + seconds            seconds = bytes on the wire / rate
    first byte arrives   begins + latency
    last byte arrives    once the inbound link has been free for `seconds` since then

The transport sends the message at once, with `begins` appended; the receiver returns it no earlier
than its last byte would arrive. All ranks read one clock, CLOCK_MONOTONIC, which the processes on a
host share. A receiver may take messages in another order than they arrive: each takes free time of
the inbound link, so the order does not matter.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from bisect import insort
from collections.abc import Callable
from typing import Final

import numpy as np

from ..cost import Link
from ..errors import MessageError
from ..vector import Array

_STAMP: Final = struct.Struct("<d")
STAMP_BYTES: Final = _STAMP.size
# Ethernet with 1500 bytes a packet: TCP payload, and the overhead of IP, TCP and the frame.
_SEGMENT_BYTES, _HEADER_BYTES = 1448, 90
_MAX_INTERVALS: Final = 64  # how many busy intervals of the inbound link to keep
# A sleep may end this much late, so the last part of a wait yields the core instead.
_SLACK_SECONDS: Final = 60e-6
_NAP_SECONDS: Final = 1e-3


def wire_bytes(message_bytes: int) -> int:
    """Return a message's bytes on Ethernet, including packet and frame headers."""
    segments = max(1, -(-message_bytes // _SEGMENT_BYTES))
    return message_bytes + segments * _HEADER_BYTES


def link_of_messages(link: Link) -> Link:
    """Return a link with its effective rate for message bytes, without header overhead."""
    per_byte = (1 + _HEADER_BYTES / _SEGMENT_BYTES) * link.seconds_per_byte
    return Link(link.latency_seconds + _HEADER_BYTES * link.seconds_per_byte, per_byte)


class Clock:
    """This host's clock, in seconds that are the same on all ranks."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, at: float, progress: Callable[[], None]) -> None:
        """Wait until a time; call `progress` now and then. Returns at once if it is past."""
        while (left := at - time.monotonic()) > 0:
            if left > _SLACK_SECONDS:
                time.sleep(min(left - _SLACK_SECONDS, _NAP_SECONDS))
                progress()
            else:
                os.sched_yield()


class Pacer:
    """A rank's end of its link; any thread may send and receive."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.clock = Clock()
        self._free_at = 0.0  # the outbound link
        self._busy: list[tuple[float, float]] = []  # inbound busy intervals (begin, end), in order
        self._lock = threading.Lock()

    def reserve_outbound(self, message_bytes: int) -> tuple[float, float]:
        """Reserve the outbound link; return when a message's first byte leaves, and its last."""
        seconds = self._seconds(message_bytes)
        with self._lock:
            begins = max(self.clock.now(), self._free_at)
            self._free_at = begins + seconds
        return begins, begins + seconds

    def reserve_inbound(self, begins: float, message_bytes: int) -> float:
        """Reserve the inbound link; return when a message's last byte arrives."""
        first = begins + self.link.latency_seconds
        with self._lock:
            last = self._fill(first, self._seconds(message_bytes))
            disjoint = [each for each in self._busy if each[1] < first or each[0] > last]
            # Merge adjacent intervals to keep the list short; only the gaps matter.
            overlapping = [each for each in self._busy if not (each[1] < first or each[0] > last)]
            insort(
                disjoint,
                (
                    min([first, *(b for b, _ in overlapping)]),
                    max([last, *(e for _, e in overlapping)]),
                ),
            )
            # Forget the earliest ones: hardly any message is read so late that it would need
            # them.
            self._busy = disjoint[-_MAX_INTERVALS:]
        return last

    def _fill(self, at: float, seconds: float) -> float:
        """Return when the inbound link, from `at` on, has been free for `seconds`; reserve that."""
        for begin, end in self._busy:
            if end <= at:
                continue
            if seconds <= begin - at:
                break
            seconds -= max(0.0, begin - at)
            at = end
        return at + seconds

    def _seconds(self, message_bytes: int) -> float:
        return wire_bytes(message_bytes) * self.link.seconds_per_byte


def append_stamp(message: Array, begins: float) -> Array:
    """Return a copy of uint8 [m] with its departure time appended, uint8 [m + 8]."""
    stamped = np.empty(message.size + STAMP_BYTES, np.uint8)
    stamped[:-STAMP_BYTES] = message
    stamped[-STAMP_BYTES:] = np.frombuffer(_STAMP.pack(begins), np.uint8)
    return stamped


def split_stamp(stamped: Array, sender: int) -> tuple[Array, float]:
    """Return message and stamp; raise MessageError, naming the sender, if it is malformed."""
    if stamped.size < STAMP_BYTES:
        raise MessageError(
            f"the message from rank {sender} is malformed: its {stamped.size} bytes have no "
            "time stamp, which messages over an emulated link need"
        )
    (begins,) = _STAMP.unpack(stamped[-STAMP_BYTES:].tobytes())
    return stamped[:-STAMP_BYTES], begins
