"""Crowding: how many ranks share a core, on whatever they take for hosts of their own.

Containers, and hosts that one machine emulates, have names of their own and share its kernel: ranks
that tell the same boot of a kernel are taken to be on one machine. A container that is told another
one (systemd-nspawn, LXC) is taken for a machine.

A core is what Linux counts: each hardware thread is one. What a thread loses to its sibling is in
the rates, which all ranks measure at the same time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..cores import granted_cores
from ..transports.transport import Transport


class Seat(NamedTuple):
    """Where a rank is: its machine, the cores it may run on, and how many of them are granted.

    quota: to all in the same control group together; infinity: as many as there are.
    """

    machine: str
    cores: Sequence[int]
    quota: float
    group: str


def own_seat(boot: Path = Path("/proc/sys/kernel/random/boot_id")) -> Seat:
    """Return that of this process."""
    try:
        machine = boot.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    return Seat(machine, cores, *granted_cores())


def ranks_per_core(transport: Transport) -> float:
    """Return how many ranks share a core where most do, at least 1; every rank must call it.

    Of these ranks: a process set does not know who else is on its cores.
    """
    return most_per_core([Seat(*each) for each in transport.gather_object(own_seat())])


def most_per_core(seats: Sequence[Seat]) -> float:
    """Return the same of ranks in these seats."""
    most = 1.0
    for machine in {seat.machine for seat in seats}:
        here = [(frozenset(seat.cores), seat) for seat in seats if seat.machine == machine]
        everywhere = frozenset[int]().union(*(cores for cores, _ in here))
        for cores in {everywhere, *(cores for cores, _ in here)}:
            most = max(most, sum(own <= cores for own, _ in here) / len(cores))
        for grant in {(seat.group, seat.quota) for _, seat in here}:
            most = max(most, sum((seat.group, seat.quota) == grant for _, seat in here) / grant[1])
    return most
