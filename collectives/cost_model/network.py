"""Network: ranks, nodes and links; the rates of the machines; how many ranks share a core.

Containers, and hosts that one machine emulates, have different names and share the machine's
kernel: ranks that read the same boot id are taken to be on one machine. A container with a boot id
of its own (systemd-nspawn, LXC) is taken for a machine.

A core is one that Linux counts: each hardware thread. The slowdown by the sibling thread is in the
rates, which all ranks measure at the same time.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..cores import granted_cores
from ..cost import Link, rounds
from ..transports.transport import Transport
from ..wire import WHOLE, Format
from .schedules import FORMATS

_ROUNDING: Final = 1e-9  # of a ratio of two whole numbers


class Network(NamedTuple):
    """Ranks on nodes; rank r is on node r // ranks_per_node.

    between: the link of a node, shared by all its ranks. within: a rank's own link to its node.
    allreduce: the latency and the bandwidth that fit the times of measured allreduces; None: those
               of the links above.
    native_bytes: from here on an allreduce is the library's own, and no words answer its messages;
                  None: none is.
    ranks_per_core: the most ranks that share a core; 1: each has one of its own.
    agreement_seconds: time until every rank has a message of each other one, as before every
                       reduction of a training; None: ceil(log2 P) latencies.
    """

    ranks: int
    between: Link
    ranks_per_node: int = 1
    within: Link | None = None
    allreduce: Link | None = None
    agreement_seconds: float | None = None
    native_bytes: int | None = None
    ranks_per_core: float = 1.0

    @property
    def is_one_node(self) -> bool:
        """Tell whether no message leaves its node."""
        return self.ranks <= self.ranks_per_node

    @property
    def farthest(self) -> Link:
        """Return the link of a rank to the ranks that are farthest away."""
        return self.link(int(not self.is_one_node))

    @property
    def expected_agreement_seconds(self) -> float:
        """Return the measured seconds of an agreement, else those expected of the links."""
        if self.agreement_seconds is not None:
            return self.agreement_seconds
        return rounds(self.ranks) * self.farthest.latency_seconds

    def coding_waves(self, ranks: int) -> int:
        """Return how many turns `ranks` ranks that code at the same time take on their cores."""
        # Less what rounding may add to a whole number: it would count as a further turn.
        return max(1, math.ceil(self.ranks_per_core * ranks / self.ranks - _ROUNDING))

    def link(self, leaving: int) -> Link:
        """Return a rank's share of the link when `leaving` ranks of its node use it at once."""
        if leaving == 0 and self.within is not None:
            return self.within
        sharing = max(1, leaving)
        return self.between._replace(seconds_per_byte=self.between.seconds_per_byte * sharing)

    def scaled(self, factor: float) -> Network:
        """Return the network on which every message takes `factor` times as long."""
        return self._replace(
            between=self.between.scaled(factor),
            within=self.within and self.within.scaled(factor),
            allreduce=self.allreduce and self.allreduce.scaled(factor),
            agreement_seconds=self.agreement_seconds and factor * self.agreement_seconds,
        )


class CodingRate(NamedTuple):
    """Seconds of coding an entry, including its checksum and its rounding error."""

    encode_seconds: float
    decode_seconds: float


class Rates(NamedTuple):
    """Seconds per element and per entry, of the slowest rank.

    select_seconds: per element of the gradient: accumulate, select, clear the update's vector.
    merge_seconds:  per entry that goes into a merge, and to find out whose picks are alive.
    coding:         per entry, by format; a format that is not there is not offered.
    swap_seconds:   of the calls for each list that is sent and merged with a received one, at any
                    length, where all ranks make them at once.
    list_seconds:   the same of each further list that is decoded.
    send_seconds:   the same of each list that is encoded and sent by itself, one after another.
    copy_seconds:   per element of a dense gradient: into one buffer, weighted, and back.
    sum_seconds:    per entry of lists that are added up in pairs, and go: ceil(log2) of them.
    pick_seconds:   per entry that is selected: into a list, out of the residual, into the update.
    """

    select_seconds: float
    merge_seconds: float
    coding: Mapping[Format, CodingRate]
    swap_seconds: float = 0.0
    list_seconds: float = 0.0
    copy_seconds: float = 0.0
    sum_seconds: float = 0.0
    pick_seconds: float = 0.0
    send_seconds: float = 0.0

    def coding_of(self, format: Format) -> CodingRate | None:
        """Return the coding rate of a format; None where it was not measured.

        A format without indices gets the rate of raw ones: an upper bound, as rounding errors are
        then found entry by entry.
        """
        return self.coding.get(
            format._replace(indices="raw") if format.indices == WHOLE else format
        )

    def without_calls(self) -> Rates:
        """Return the rates without the per-call seconds of lists."""
        return self._replace(swap_seconds=0.0, list_seconds=0.0, send_seconds=0.0)


# Rounded rates of the C++ core on one core of a server of the 2020s, for when none are measured.
_INDEX_SECONDS: Final = {"raw": (2e-9, 3e-9), "blocks": (2e-9, 3e-9), "packed": (4.5e-9, 5e-9)}
_VALUE_SECONDS: Final = {
    "exact": (0.0, 0.0),
    "bf16": (1.6e-8, 5e-10),
    "fp16": (1.6e-8, 5e-10),
    "int8": (1.7e-8, 1e-9),
    "int4": (1.8e-8, 1.5e-9),
    "int3": (1.8e-8, 1.5e-9),
    "int2": (1.8e-8, 1.5e-9),
}
DEFAULT_RATES: Final = Rates(
    5e-10,
    1.1e-8,
    {
        format: CodingRate(
            *map(
                sum, zip(_INDEX_SECONDS[format.indices], _VALUE_SECONDS[format.values], strict=True)
            )
        )
        for format in FORMATS
    },
    3e-4,
    3e-5,
    3e-10,
    3e-9,
    1e-8,
    6e-5,
)


class Placement(NamedTuple):
    """A rank's place: its machine, the cores it may run on, and its quota of cores.

    quota: of all processes in the same control group together; infinity: no limit.
    """

    machine: str
    cores: Sequence[int]
    quota: float
    group: str


def own_placement(boot: Path = Path("/proc/sys/kernel/random/boot_id")) -> Placement:
    """Return where this process runs."""
    try:
        machine = boot.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    return Placement(machine, cores, *granted_cores())


def ranks_per_core(transport: Transport) -> float:
    """Return how many ranks share a core where most do, at least 1; every rank must call it.

    Only ranks of this transport count: a process set does not know of others on its cores.
    """
    return most_per_core([Placement(*each) for each in transport.gather_object(own_placement())])


def most_per_core(placements: Sequence[Placement]) -> float:
    """Return the most ranks that share a core, at least 1, of ranks that run there."""
    most = 1.0
    for machine in {place.machine for place in placements}:
        here = [(frozenset(place.cores), place) for place in placements if place.machine == machine]
        everywhere = frozenset[int]().union(*(cores for cores, _ in here))
        # Sets of cores may overlap: for each set count the ranks that cannot run outside of it.
        for cores in {everywhere, *(cores for cores, _ in here)}:
            most = max(most, sum(own <= cores for own, _ in here) / len(cores))
        for (_, quota), sharing in Counter((place.group, place.quota) for _, place in here).items():
            # A group's quota is for all of its processes; without one it is infinite, and nobody
            # shares.
            most = max(most, sharing / quota)
    return most
