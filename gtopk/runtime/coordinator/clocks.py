"""Clocks: this rank's offset from rank 0's clock, to put all ranks' records on one time axis.

rank r   |--asks---------------------->  hears |        The shortest of several round trips counts:
rank 0                | says its time |                 assume that rank 0 answered halfway through.
                                                        The error is at most half the round trip
                                                        (Cristian 1989).

Ranks on rank 0's host read the same clock: time.perf_counter counts from the host's boot.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np

from collectives.cores import machine
from collectives.transports import Transport

_ROUND_TRIPS: Final = 8


class Offset(NamedTuple):
    """time.perf_counter of this rank minus that of rank 0 at one moment, and the error bound."""

    ahead_seconds: float = 0.0
    uncertain_seconds: float = 0.0


def clock_offset(transport: Transport) -> Offset:
    """Return this rank's offset. A collective: every rank must call it."""
    machines = transport.gather_object(machine())  # ranks of one machine read one clock
    others = [rank for rank, each in enumerate(machines) if each != machines[0]]
    offset = Offset()
    # One rank at a time: a busy rank 0 would lengthen the round trips.
    for rank in others:
        if transport.rank == 0:
            for _ in range(_ROUND_TRIPS):
                transport.receive(rank)
                transport.send(np.array([time.perf_counter()]).view(np.uint8), rank)()
        elif transport.rank == rank:
            offset = min((_measure(transport) for _ in range(_ROUND_TRIPS)), key=lambda o: o[1])
    return offset


def agree_on_now(transport: Transport) -> float:
    """Return rank 0's time in Unix seconds on all ranks. A collective: every rank must call it."""
    return float(transport.broadcast_object(time.time()))


def _measure(transport: Transport) -> Offset:
    began = time.perf_counter()
    sent = transport.send(np.zeros(1, np.uint8), 0)
    remote = float(transport.receive(0).view(np.float64)[0])
    sent()
    ended = time.perf_counter()
    return Offset((began + ended) / 2 - remote, (ended - began) / 2)
