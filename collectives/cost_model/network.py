"""Network: ranks, nodes and links; the rates of the machines; how many ranks share a core.

Ranks that read the same boot id are on one machine, since containers, and hosts that one machine
emulates, have different names but share a kernel. A container with a boot id of its own
(systemd-nspawn, LXC) counts as a machine.

A core here is a hardware thread. The rates contain the slowdown by the sibling thread, as all ranks
measure them at the same time.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..cores import granted_cores, machine
from ..cost import Link, rounds
from ..transports.transport import Transport
from ..wire import WHOLE, Format
from .schedules import FORMATS

_ROUNDING: Final = 1e-9  # relative to a ratio of two whole numbers


class Network(NamedTuple):
    """Ranks on nodes; rank r is on node r // ranks_per_node.

    between: the link between two nodes, shared by all ranks of a node.
    within:  a rank's own link to the others of its node.
    allreduce: the latency and bandwidth that fit measured allreduces; None: those of the links.
    native_bytes: allreduces of at least so many bytes use the communication library's own, which
                  needs no acknowledgements; None: none does.
    ranks_per_core: the most ranks that share a core, at least 1.
    agreement_seconds: time until every rank has a message from every other one, which a training
                       needs before each reduction; None: ceil(log2 P) latencies.
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
        """Return a rank's link to the farthest ranks."""
        return self.link(int(not self.is_one_node))

    @property
    def expected_agreement_seconds(self) -> float:
        """Return the measured seconds of an agreement, or else those expected from the links."""
        if self.agreement_seconds is not None:
            return self.agreement_seconds
        return rounds(self.ranks) * self.farthest.latency_seconds

    def coding_waves(self, ranks: int) -> int:
        """Return how many ranks code one after the other on a core if `ranks` of them code."""
        # Less a rounding error, with which a whole number of waves could round up to one more.
        return max(1, math.ceil(self.ranks_per_core * ranks / self.ranks - _ROUNDING))

    def link(self, leaving: int) -> Link:
        """Return a rank's share of the link while `leaving` ranks of its node send to other nodes.

        leaving: 0 for messages that stay inside their node.
        """
        if leaving == 0 and self.within is not None:
            return self.within
        sharing = max(1, leaving)
        return self.between._replace(seconds_per_byte=self.between.seconds_per_byte * sharing)

    def scaled(self, factor: float) -> Network:
        """Return the network with the time of every message multiplied by a factor."""
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
    merge_seconds:  per input entry of a merge, including the search for picks that are alive.
    coding:         per entry, by format; a format that is not there is not offered.
    swap_seconds:   per-call overhead of a list that is sent and merged with a received one, with
                    all ranks doing so at once.
    list_seconds:   per-call overhead of each further list that is decoded.
    send_seconds:   per-call overhead of each further list that is encoded and sent.
    copy_seconds:   per element of a dense gradient: copy to one buffer, weight, copy back.
    sum_seconds:    per entry of lists that are summed pairwise, and pass: there are ceil(log2).
    pick_seconds:   per selected entry: copy to a list, clear in the residual, set in the update.
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
        """Return the coding rate of a format; None if it was not measured.

        A format without indices gets the rate of raw ones, an upper bound.
        """
        return self.coding.get(
            format._replace(indices="raw") if format.indices == WHOLE else format
        )

    def without_calls(self) -> Rates:
        """Return the rates without per-call overheads."""
        return self._replace(swap_seconds=0.0, list_seconds=0.0, send_seconds=0.0)


# Used if none are measured: rounded rates of the C++ core on one core of a server of the 2020s.
# By code, seconds an entry to encode and to decode.
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


def _default_coding(format: Format) -> CodingRate:
    indices, values = _INDEX_SECONDS[format.indices], _VALUE_SECONDS[format.values]
    return CodingRate(indices[0] + values[0], indices[1] + values[1])


DEFAULT_RATES: Final = Rates(
    select_seconds=5e-10,
    merge_seconds=1.1e-8,
    coding={format: _default_coding(format) for format in FORMATS},
    swap_seconds=3e-4,
    list_seconds=3e-5,
    copy_seconds=3e-10,
    sum_seconds=3e-9,
    pick_seconds=1e-8,
    send_seconds=6e-5,
)


class Placement(NamedTuple):
    """A rank's machine, the cores it may run on, and its CPU quota.

    quota: in cores, shared by all processes of the control group; infinity: no limit.
    """

    machine: str
    cores: Sequence[int]
    quota: float
    group: str


def own_placement() -> Placement:
    """Return where this process runs."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    return Placement(machine(), cores, *granted_cores())


def ranks_per_core(transport: Transport) -> float:
    """Return the most ranks that share a core, at least 1; every rank must call it.

    Only ranks of this transport count: a process set ignores other ranks on its cores.
    """
    return most_per_core([Placement(*each) for each in transport.gather_object(own_placement())])


def most_per_core(placements: Sequence[Placement]) -> float:
    """Return the most ranks that share a core, at least 1, for ranks placed like this."""
    most = 1.0
    for name in {place.machine for place in placements}:
        on_machine = [place for place in placements if place.machine == name]
        allowed = [frozenset(place.cores) for place in on_machine]
        all_cores = frozenset[int]().union(*allowed)
        # Sets of cores may overlap: for each set count the ranks that may run only inside it.
        for cores in {all_cores, *allowed}:
            most = max(most, sum(own <= cores for own in allowed) / len(cores))
        groups = Counter((place.group, place.quota) for place in on_machine)
        for (_, quota), sharing in groups.items():
            # A group's quota is for all its processes together; infinite without a limit.
            most = max(most, sharing / quota)
    return most
