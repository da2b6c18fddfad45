"""The links between the ranks of the running job: each pair swaps messages; bad ones are named.

    first     every rank sends every other one a message that both can predict: it has to arrive
              whole, and in time
    then      the pairs swap large ones, many pairs at a time: a link that is much slower than the
              median of its kind (inside a host, between hosts) is named

        round 0     0-3 1-2          4 ranks: 3 rounds, in which each meets each once
        round 1     0-2 3-1          (of an odd number of ranks one rests in each round)
        round 2     0-1 2-3

Runs in the ranks' children; rank 0 gathers what they found.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from collectives.cost import Link
from collectives.cost_model import Budget, Calibration, Prediction, calibrate, choose
from collectives.cost_model.schedules import FORMATS
from collectives.errors import CollectiveError, PeerTimeoutError
from collectives.transports import Transport

from ... import __version__

TRY_SECONDS: Final = 10.0  # what a message gets to arrive
_MESSAGE_BYTES: Final = 1 << 16
_LARGE_BYTES: Final = 1 << 20
_SWAPS: Final = 5
_MUCH: Final = 4.0  # times slower than the median
# Times TRY_SECONDS: a rank that has waited for others in vain reports late.
_REPORT_TIMES: Final = 3


class Swapped(NamedTuple):
    """The seconds that a pair takes to swap a mebibyte, each way."""

    one: int
    other: int
    seconds: float


class Links(NamedTuple):
    """The outcome: how many links were tried, and a text for each that is bad.

    broken: of those over which a message did not arrive as it was sent, one for each way.
    """

    tried: int
    broken: list[str]
    slow: list[str]


def try_links(transport: Transport) -> Links | None:
    """Try the link of each pair of ranks; return the result on rank 0, None elsewhere.

    All ranks call it together, on a transport that waits for TRY_SECONDS.
    """
    found = _gather(transport, [socket.gethostname(), sorted(_meet_all(transport).items())])
    tried = transport.size * (transport.size - 1) // 2
    # Over a broken link measuring would wait for what does not come.
    if broken := _name_broken(found):
        _broadcast_decision(transport, False)
        return Links(tried, broken, [])
    if not _broadcast_decision(transport, True):
        return None
    measured = _gather(transport, _swap_with_all(transport))
    if transport.rank != 0:
        return None
    swapped = [Swapped(*words) for row in measured for words in row or []]
    return Links(tried, [], name_slow(swapped, [row[0] for row in found]))


def _message(sender: int, receiver: int) -> bytes:
    """Return the first message of one rank to another."""
    return np.random.default_rng([sender, receiver]).bytes(_MESSAGE_BYTES)


def _meet_all(transport: Transport) -> dict[int, str]:
    """Swap messages with every other rank; return what was wrong, by rank."""
    # All sends first: a rank that waited for one broken link would be late on all others.
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    for other in others:
        transport.send(np.frombuffer(_message(transport.rank, other), np.uint8), other)
    wrong = {}
    for other in others:
        try:
            arrived = transport.receive(other).tobytes()
        except CollectiveError as error:
            wrong[other] = str(error)
        else:
            if arrived != _message(other, transport.rank):
                wrong[other] = "what arrived is not what was sent"
    return wrong


def _gather(transport: Transport, own: Any) -> list[Any]:
    """Return on rank 0 what each rank has found, None where that did not come; else []."""
    if transport.rank != 0:
        transport.send(np.frombuffer(json.dumps(own).encode(), np.uint8), 0)
        return []
    found = [own]
    return found + [_report_of(transport, rank) for rank in range(1, transport.size)]


def _report_of(transport: Transport, rank: int) -> Any:
    """Return a rank's findings; a rank that waited for others in vain reports late."""
    for _ in range(_REPORT_TIMES):
        try:
            return json.loads(transport.receive(rank).tobytes())
        except PeerTimeoutError:
            continue
        except (CollectiveError, ValueError):
            break
    return None


def _broadcast_decision(transport: Transport, go_on: bool) -> bool:
    """Return rank 0's answer; False where it does not come."""
    if transport.rank == 0:
        for rank in range(1, transport.size):
            transport.send(np.array([go_on], np.uint8), rank)
        return go_on
    try:
        return bool(transport.receive(0)[0])
    except CollectiveError:
        return False


def _name_broken(found: Sequence[Any]) -> list[str]:
    """Return a text for each link over which a message did not arrive as it was sent."""
    hosts = [
        f"rank {rank} (host {row[0]})" if row else f"rank {rank}" for rank, row in enumerate(found)
    ]
    bad = []
    for rank, row in enumerate(found):
        if row is None:
            bad.append(f"{hosts[rank]} -> {hosts[0]}: its report did not arrive")
            continue
        bad += [f"{hosts[other]} -> {hosts[rank]}: {what}" for other, what in row[1]]
    return bad


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs that swap at a time, each pair once in all (the circle method)."""
    # One seat stays, the others move on by one: each pair meets once.
    seats = [*range(size), *([-1] * (size % 2))]
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        yield [
            (one, other)
            for one, other in zip(seats[:half], reversed(seats[half:]), strict=True)
            if min(one, other) >= 0
        ]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _swap_with_all(transport: Transport) -> list[Swapped]:
    """Swap with every other rank in turn; return the pairs that this rank is the first of."""
    swapped = []
    for pairs in rounds(transport.size):
        mine = next((pair for pair in pairs if transport.rank in pair), None)
        if mine is None:
            continue
        other = mine[1] if mine[0] == transport.rank else mine[0]
        if mine[0] == transport.rank:
            swapped.append(Swapped(*mine, _quickest_swap(transport, other)))
        else:
            _quickest_swap(transport, other)
    return swapped


def _quickest_swap(transport: Transport, other: int) -> float:
    """Return the seconds that the quickest of a few swaps took."""
    message = np.zeros(_LARGE_BYTES, np.uint8)
    taken = []
    for _ in range(_SWAPS):
        begun = time.perf_counter()
        transport.exchange(message, other)
        # The quickest counts: other traffic can only add.
        taken.append(time.perf_counter() - begun)
    return min(taken)


def name_slow(swapped: Sequence[Swapped], hosts: Sequence[str]) -> list[str]:
    """Return a text for each pair that is much slower than the median of its kind."""
    slow = []
    # Apart: links between hosts are slower than those inside, and none of them is bad for it.
    for within in (True, False):
        kind = [each for each in swapped if (hosts[each.one] == hosts[each.other]) == within]
        if not kind:
            continue
        usual = statistics.median(each.seconds for each in kind)
        slow += [
            f"rank {each.one} (host {hosts[each.one]}) <-> rank {each.other} (host "
            f"{hosts[each.other]}): 1 MiB each way takes {1e3 * each.seconds:.3g} ms, where "
            f"{'inside a host' if within else 'between hosts'} the median is {1e3 * usual:.3g} ms"
            for each in kind
            if each.seconds > _MUCH * usual
        ]
    return slow


# Whether compression would pay on the links of the running ranks.
MODEL, LENGTH, DENSITY = "ResNet-50", 25_557_032, 0.001
_EXACT: Final = [format for format in FORMATS if format.values == "exact"]


def describe_network(transport: Transport) -> str:
    """Return a sentence on the links, and one on what pays; every rank must call it."""
    calibration = calibrate(transport, FORMATS, {"gtopk": __version__})
    return describe(calibration)


def describe(calibration: Calibration) -> str:
    """Return the meaning of a calibration for a model of a well-known size."""
    network = calibration.network
    links = []
    if network.ranks > network.ranks_per_node:
        links.append(f"between hosts {_link(network.between)}")
    if network.within is not None:
        links.append(f"inside a host {_link(network.within)}")
    # At exact values, as the pages' figures are: rounding is a choice of its own.
    choices = choose(LENGTH, calibration, Budget(density=DENSITY), _EXACT)
    seconds = {each.candidate.algorithm: each for each in reversed(choices)}
    dense, best = seconds.pop("dense"), min(seconds.values(), key=lambda each: each.seconds)
    pays = choices[0].candidate.algorithm != "dense"
    step = (
        f"a step of {MODEL}'s size at density {DENSITY:g} would take "
        f"{_milliseconds(dense)} dense, {_milliseconds(best)} by {best.candidate.algorithm}: "
        f"compression {'pays' if pays else 'would not pay'} here ({calibration.origin})"
    )
    return f"{', '.join(links)}; {step}" if links else step


def _link(link: Link) -> str:
    return f"{link.bits_per_second / 1e9:.3g} Gbit/s and {1e6 * link.latency_seconds:.3g} us"


def _milliseconds(found: Prediction) -> str:
    return f"{1e3 * found.seconds:.3g} ms"
