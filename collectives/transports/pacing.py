"""Pacing: every message takes the time that it would take over a slow link.

A rank's link takes one message at a time in each direction. A message that is sent at time t waits
until the link out is free, and its end comes in when the link in has had time for all of it:

    first byte leaves    begins = max(t, last byte of the message before)
    last byte leaves     begins + seconds            seconds = bytes on the wire / rate
    first byte arrives   begins + latency
    last byte arrives    when the link in was free for that long since then

The transport sends the message at once, with `begins` at its end; the receiver returns it no sooner
than its last byte would arrive. All ranks read one clock, CLOCK_MONOTONIC, which the processes of a
host share. A receiver may take messages in another order than they arrive in: each takes free time
of the link in, so that the order does not matter.
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
# Ethernet with 1500 bytes a packet: what TCP has of it, and what IP, TCP and the frame add.
_SEGMENT_BYTES, _HEADER_BYTES = 1448, 90
_KEPT: Final = 64  # times at which the link in was busy
# A sleep may end that much late: the last part of a wait yields the core instead.
_SLACK_SECONDS: Final = 60e-6
_NAP_SECONDS: Final = 1e-3


def wire_bytes(message_bytes: int) -> int:
    """Return the bytes of a message on an Ethernet, headers of packets and frames included."""
    segments = max(1, -(-message_bytes // _SEGMENT_BYTES))
    return message_bytes + segments * _HEADER_BYTES


def link_of_messages(link: Link) -> Link:
    """Return a link's effective rate for message bytes, without packet and frame headers."""
    per_byte = (1 + _HEADER_BYTES / _SEGMENT_BYTES) * link.seconds_per_byte
    return Link(link.latency_seconds + _HEADER_BYTES * link.seconds_per_byte, per_byte)


class Clock:
    """The clock of this host: seconds that are the same on all ranks."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, at: float, progress: Callable[[], None]) -> None:
        """Wait until a time, not at all when it is past; call `progress` now and then."""
        while (left := at - time.monotonic()) > 0:
            if left > _SLACK_SECONDS:
                time.sleep(min(left - _SLACK_SECONDS, _NAP_SECONDS))
                progress()
            else:
                os.sched_yield()


class Pacer:
    """A rank's end of its link; any of its threads may send and receive."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.clock = Clock()
        self._free_at = 0.0  # the link out
        self._busy: list[tuple[float, float]] = []  # the link in: from when until when, in order
        self._lock = threading.Lock()

    def leave(self, message_bytes: int) -> tuple[float, float]:
        """Take the link out; return when the first byte of a message leaves, and the last one."""
        seconds = self._seconds(message_bytes)
        with self._lock:
            begins = max(self.clock.now(), self._free_at)
            self._free_at = begins + seconds
        return begins, begins + seconds

    def arrive(self, begins: float, message_bytes: int) -> float:
        """Take the link in; return when the last byte of a message arrives."""
        first = begins + self.link.latency_seconds
        with self._lock:
            last = self._fill(first, self._seconds(message_bytes))
            apart = [each for each in self._busy if each[1] < first or each[0] > last]
            # Times that touch become one: what is kept stays short, and gaps are all that counts.
            merged = [each for each in self._busy if not (each[1] < first or each[0] > last)]
            insort(
                apart, (min([first, *(b for b, _ in merged)]), max([last, *(e for _, e in merged)]))
            )
            # The earliest are forgotten: hardly any message is read so late that it would need
            # them.
            self._busy = apart[-_KEPT:]
        return last

    def _fill(self, at: float, seconds: float) -> float:
        """Return when the link in, from `at` on, has been free for `seconds`; take that time."""
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
    """Return a copy of uint8 [m] with the time at which it leaves behind it, uint8 [m + 8]."""
    stamped = np.empty(message.size + STAMP_BYTES, np.uint8)
    stamped[:-STAMP_BYTES] = message
    stamped[-STAMP_BYTES:] = np.frombuffer(_STAMP.pack(begins), np.uint8)
    return stamped


def split_stamp(stamped: Array, sender: int) -> tuple[Array, float]:
    """Return the message before its stamp, and the stamp; raise MessageError, naming the sender."""
    if stamped.size < STAMP_BYTES:
        raise MessageError(
            f"the message from rank {sender} is malformed: its {stamped.size} bytes do not say "
            "when it was sent, as they do over an emulated link"
        )
    (begins,) = _STAMP.unpack(stamped[-STAMP_BYTES:].tobytes())
    return stamped[:-STAMP_BYTES], begins
