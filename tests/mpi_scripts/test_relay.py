"""The relay's switch delivers frames in order, after the delay, and loses the requested share."""

from __future__ import annotations

import math

import pytest

from mpi_scripts.relay import Switch

BYTES_PER_SECOND = 1e6
EVERYONE = b"\xff" * 6


def address(port: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, port])


def frame(source: int, to: int | None, number: int = 0, size: int = 1000) -> bytes:
    receiver = EVERYONE if to is None else address(to)
    return (receiver + address(source) + number.to_bytes(4, "big")).ljust(size, b"\0")


class Wire:
    """A switch, a clock that is set by hand, and the frames that arrived, with time and port."""

    def __init__(self, ports: int, **options: float) -> None:
        self.came: list[tuple[float, int, bytes]] = []
        self.now = 0.0
        self.switch = Switch(ports, BYTES_PER_SECOND, self._write, **options)  # type: ignore[arg-type]
        for port in range(ports):  # the switch learns each port's address
            self.switch.take(port, frame(port, None), 0.0)
        self.settle()
        self.met = len(self.came)
        self.came.clear()

    def _write(self, port: int, content: bytes) -> None:
        self.came.append((self.now, port, content))

    def settle(self) -> None:
        due = self.switch.pass_on(self.now)
        while due is not None:
            assert due > self.now
            self.now = due
            due = self.switch.pass_on(self.now)


@pytest.mark.parametrize("ports", [2, 3, 5])
def test_switch_floods_only_frames_for_unknown_receivers(ports):
    wire = Wire(ports)
    assert wire.met == ports * (ports - 1)
    for to in range(1, ports):
        wire.switch.take(0, frame(0, to), wire.now)
    wire.switch.take(0, frame(0, ports), wire.now)
    wire.settle()
    assert sorted(port for _, port, _ in wire.came) == sorted(2 * list(range(1, ports)))


def test_switch_delivers_frames_in_order_after_delay_and_transmission_time():
    wire, delay_seconds, size = Wire(3, delay_seconds=0.25), 0.25, 1000
    sent = wire.now
    for number in range(20):
        wire.switch.take(number % 2, frame(number % 2, 2, number, size), sent)
    wire.settle()
    seconds = size / BYTES_PER_SECOND
    for place, (came, port, content) in enumerate(wire.came):
        assert port == 2
        assert content[12:16] == place.to_bytes(4, "big")
        assert math.isclose(came - sent, delay_seconds + (place + 1) * seconds)
    assert len(wire.came) == 20


def test_switch_delays_and_loses_frames_only_between_sites():
    wire = Wire(4, delay_seconds=1.0, loss=0.999999, sites=2)
    sent = wire.now
    for source in range(4):
        for to in set(range(4)) - {source}:
            wire.switch.take(source, frame(source, to), sent)
    wire.settle()
    assert {(content[11], port) for _, port, content in wire.came} == {
        (0, 1), (1, 0), (2, 3), (3, 2)
    }  # fmt: skip
    assert wire.now - sent < 1.0


def test_switch_loses_the_requested_share_and_repeats_with_the_seed():
    def lost(seed: int) -> set[int]:
        wire = Wire(2, loss=0.1, seed=seed)
        for number in range(4000):
            wire.switch.take(0, frame(0, 1, number, 64), wire.now)
        wire.settle()
        came = {int.from_bytes(content[12:16], "big") for _, _, content in wire.came}
        return set(range(4000)) - came

    assert lost(1) == lost(1) != lost(2)
    assert 300 < len(lost(1)) < 500  # five standard deviations of 19
