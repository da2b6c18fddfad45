"""Relay: the switch between emulated hosts whose links are long or lose frames.

It has a TAP device for each host, port0, port1, ...: it reads the frames that the host sends, and
writes those that the host is to receive. A frame's way:

    sent by host a     at once      after the delay          at the port's rate, in turn
    read from port a   lost, or ->  arrives at port b    ->  written to port b

Between hosts of one site, frames are neither lost nor delayed. It prints "ready" when the devices
exist and can be moved to their hosts, and runs until it is killed.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

_TUNSETIFF: Final = 0x400454CA
_TAP, _WITHOUT_HEADER, _AT_ONCE = 0x0002, 0x1000, 64  # frames to read from one port before the next
_FRAME_BYTES: Final = 1 << 16


class Switch:
    """The frames in transit between ports.

    delay_seconds, loss: delay and loss probability of a frame to another site.
    """

    def __init__(
        self,
        ports: int,
        bytes_per_second: float,
        write: Callable[[int, bytes], None],
        delay_seconds: float = 0.0,
        loss: float = 0.0,
        sites: int | None = None,
        seed: int = 0,
    ) -> None:
        """write: called with a port and a frame; sites: each port's site; None: all different."""
        self._site = [port * (sites or ports) // ports for port in range(ports)]
        self._seconds_per_byte = 1 / bytes_per_second
        self._write = write
        self._delay_seconds = delay_seconds
        self._loss = loss
        self._random = random.Random(seed)
        self._port_of: dict[bytes, int] = {}  # by MAC address
        self._free_at = [0.0] * ports
        # When, in which order, to which port, which frame, whether its turn at the port is over.
        self._waiting: list[tuple[float, int, int, bytes, bool]] = []
        self._numbers = itertools.count()

    def take(self, source: int, frame: bytes, now: float) -> None:
        """Send a frame to its receiver's port, or to all others while that is unknown."""
        receiver, sender = frame[:6], frame[6:12]
        self._port_of[sender] = source
        target = self._port_of.get(receiver)
        targets = range(len(self._site)) if target is None else [target]
        for port in targets:
            far = self._site[port] != self._site[source]
            if port != source and not (far and self._random.random() < self._loss):
                arrives = now + self._delay_seconds * far
                self._wait(arrives, port, frame, is_through=False)

    def pass_on(self, now: float) -> float | None:
        """Write the frames that are due; return when the next one is due; None: no frame waits."""
        while self._waiting and self._waiting[0][0] <= now:
            due, _, port, frame, is_through = heapq.heappop(self._waiting)
            if is_through:
                self._write(port, frame)
            else:
                begins = max(due, self._free_at[port])
                self._free_at[port] = begins + len(frame) * self._seconds_per_byte
                self._wait(self._free_at[port], port, frame, is_through=True)
        return self._waiting[0][0] if self._waiting else None

    def _wait(self, due: float, port: int, frame: bytes, is_through: bool) -> None:
        heapq.heappush(self._waiting, (due, next(self._numbers), port, frame, is_through))


def open_port(name: str) -> int:
    """Return the descriptor of a new TAP device."""
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _WITHOUT_HEADER))
    return port


def frames_of(port: int) -> Iterator[bytes]:
    """Yield the frames that have arrived at a port; none if it is down."""
    with suppress(OSError):
        for _ in range(_AT_ONCE):
            yield os.read(port, _FRAME_BYTES)


def main() -> None:
    """Forward frames until this process is killed."""
    parser = argparse.ArgumentParser(description="The switch of emulated_network.sh.")
    parser.add_argument("hosts", type=int)
    parser.add_argument("bytes_per_second", type=float)
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--loss", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--sites", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ports = [open_port(f"port{host}") for host in range(options.hosts)]

    def write(port: int, frame: bytes) -> None:
        with suppress(OSError):  # an interface that is down accepts nothing
            os.write(ports[port], frame)

    switch = Switch(
        *(options.hosts, options.bytes_per_second, write),
        *(options.delay, options.loss, options.sites, options.seed),
    )
    print("ready", flush=True)
    # High priority, so that frames do not wait for the ranks, which use the cores.
    os.nice(-20)
    numbers = {port: number for number, port in enumerate(ports)}
    due: float | None = None
    while True:
        wait_seconds = None if due is None else max(0.0, due - time.monotonic())
        for port in select.select(ports, [], [], wait_seconds)[0]:
            for frame in frames_of(port):
                switch.take(numbers[port], frame, time.monotonic())
        due = switch.pass_on(time.monotonic())


if __name__ == "__main__":
    main()
