"""Crowding: how many ranks share a core, on whatever they take for hosts of their own.

Containers, and hosts that one machine emulates, have names of their own and share its kernel: ranks
that tell the same boot of a kernel are on one machine.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..cores import allowed_cores, core_quota
from ..transports.transport import Transport


class Seat(NamedTuple):
    """Where a rank is: machine and host (or container), its cores, and its host's share of them."""

    machine: str
    host: str
    cores: Sequence[str]
    quota: float


def own_seat(boot: Path = Path("/proc/sys/kernel/random/boot_id")) -> Seat:
    """Return that of this process."""
    host = socket.gethostname()
    try:
        machine = boot.read_text().strip()
    except OSError:
        machine = host
    return Seat(machine, host, sorted(allowed_cores()), core_quota())


def ranks_per_core(transport: Transport) -> float:
    """Return how many ranks share a core where most do, at least 1; every rank must call it."""
    told = np.frombuffer(json.dumps(own_seat()).encode(), np.uint8)
    return most_per_core([Seat(*json.loads(each.tobytes())) for each in transport.allgather(told)])


def most_per_core(seats: Sequence[Seat]) -> float:
    """Return the same of ranks in these seats."""
    most = 1.0
    for machine in {seat.machine for seat in seats}:
        here = [seat for seat in seats if seat.machine == machine]
        cores = len({core for seat in here for core in seat.cores})
        granted = sum({seat.host: seat.quota for seat in here}.values())
        most = max(most, len(here) / min(cores, granted))
    return most
