"""Check the links between the ranks of the running job: each pair swaps messages.

    first     every rank sends every other one a message that both can predict; it must arrive
              intact and in time
    then      the pairs swap large messages, many pairs at a time; the report names links much
              slower than the median of their kind (inside a host, between hosts)

        round 0     0-3 1-2          4 ranks: 3 rounds; each pair meets once
        round 1     0-2 3-1          (with an odd number of ranks, one rests in each round)
        round 2     0-1 2-3

Runs in the ranks' children; rank 0 gathers the findings.
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

TRY_SECONDS: Final = 10.0  # for a message to arrive
_MESSAGE_BYTES: Final = 1 << 16
_LARGE_BYTES: Final = 1 << 20
_SWAPS: Final = 5
_SLOW_FACTOR: Final = 4.0  # times slower than the median
# Wait this many times TRY_SECONDS for a report: ranks that waited for broken links are late.
_REPORT_TIMES: Final = 3


class Swapped(NamedTuple):
    """Seconds in which a pair swaps 1 MiB each way."""

    one: int
    other: int
    seconds: float


class Links(NamedTuple):
    """The outcome: the number of tried links, and a text for each bad one.

    broken: links on which a message was lost or damaged, one text per direction.
    """

    tried: int
    broken: list[str]
    slow: list[str]


def try_links(transport: Transport) -> Links | None:
    """Try the link of each pair of ranks; return the result on rank 0, None elsewhere.

    All ranks must call it, on a transport with a timeout of TRY_SECONDS.
    """
    found = _gather(transport, [socket.gethostname(), sorted(_greet_all(transport).items())])
    tried = transport.size * (transport.size - 1) // 2
    # Do not measure with a broken link: ranks would wait for messages that never arrive.
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


def _greet_all(transport: Transport) -> dict[int, str]:
    """Swap messages with every other rank; return the errors by rank."""
    # Send to all first, so that waiting on one broken link does not delay the others.
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    for other in others:
        transport.send(np.frombuffer(_message(transport.rank, other), np.uint8), other)
    errors = {}
    for other in others:
        try:
            arrived = transport.receive(other).tobytes()
        except CollectiveError as error:
            errors[other] = str(error)
        else:
            if arrived != _message(other, transport.rank):
                errors[other] = "the message arrived damaged"
    return errors


def _gather(transport: Transport, own: Any) -> list[Any]:
    """Return every rank's findings on rank 0 (None for a lost report), [] elsewhere."""
    if transport.rank != 0:
        transport.send(np.frombuffer(json.dumps(own).encode(), np.uint8), 0)
        return []
    found = [own]
    return found + [_report_of(transport, rank) for rank in range(1, transport.size)]


def _report_of(transport: Transport, rank: int) -> Any:
    """Return a rank's findings, None if they do not arrive; wait longer, as it may be late."""
    for _ in range(_REPORT_TIMES):
        try:
            return json.loads(transport.receive(rank).tobytes())
        except PeerTimeoutError:
            continue
        except (CollectiveError, ValueError):
            break
    return None


def _broadcast_decision(transport: Transport, continues: bool) -> bool:
    """Return rank 0's decision; False if it does not arrive."""
    if transport.rank == 0:
        for rank in range(1, transport.size):
            transport.send(np.array([continues], np.uint8), rank)
        return continues
    try:
        return bool(transport.receive(0)[0])
    except CollectiveError:
        return False


def _name_broken(found: Sequence[Any]) -> list[str]:
    """Return a text for each link on which a message was lost or damaged."""
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
    """Yield the pairs of each round, so that each pair meets once (the circle method)."""
    # One seat stays fixed, and the others rotate by one.
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
    """Swap with every other rank in turn; return the pairs in which this rank comes first."""
    swapped = []
    for pairs in rounds(transport.size):
        own_pair = next((pair for pair in pairs if transport.rank in pair), None)
        if own_pair is None:
            continue
        other = own_pair[1] if own_pair[0] == transport.rank else own_pair[0]
        if own_pair[0] == transport.rank:
            swapped.append(Swapped(*own_pair, _quickest_swap(transport, other)))
        else:
            _quickest_swap(transport, other)
    return swapped


def _quickest_swap(transport: Transport, other: int) -> float:
    """Return the seconds of the fastest of a few swaps."""
    message = np.zeros(_LARGE_BYTES, np.uint8)
    taken = []
    for _ in range(_SWAPS):
        begun = time.perf_counter()
        transport.exchange(message, other)
        # Take the fastest: other traffic can only add time.
        taken.append(time.perf_counter() - begun)
    return min(taken)


def name_slow(swapped: Sequence[Swapped], hosts: Sequence[str]) -> list[str]:
    """Return a text for each pair that is much slower than the median of its kind."""
    slow = []
    # Separate medians: links between hosts are slower than inside, which is no fault.
    for within in (True, False):
        kind = [each for each in swapped if (hosts[each.one] == hosts[each.other]) == within]
        if not kind:
            continue
        median = statistics.median(each.seconds for each in kind)
        slow += [
            f"rank {each.one} (host {hosts[each.one]}) <-> rank {each.other} (host "
            f"{hosts[each.other]}): 1 MiB each way takes {1e3 * each.seconds:.3g} ms, where "
            f"{'inside a host' if within else 'between hosts'} the median is {1e3 * median:.3g} ms"
            for each in kind
            if each.seconds > _SLOW_FACTOR * median
        ]
    return slow


# Whether compression would pay on the links of the running ranks.
MODEL, LENGTH, DENSITY = "ResNet-50", 25_557_032, 0.001
_EXACT: Final = [format for format in FORMATS if format.values == "exact"]


def describe_network(transport: Transport) -> str:
    """Return text on the links, and on whether compression pays; every rank must call it."""
    calibration = calibrate(transport, FORMATS, {"gtopk": __version__})
    return describe(calibration)


def describe(calibration: Calibration) -> str:
    """Return a calibration's result for a well-known model as text."""
    network = calibration.network
    links = []
    if network.ranks > network.ranks_per_node:
        links.append(f"between hosts {_link(network.between)}")
    if network.within is not None:
        links.append(f"inside a host {_link(network.within)}")
    # Compare exact values only, as in the docs; rounding is a separate choice.
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
