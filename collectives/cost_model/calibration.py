"""Calibration: measure links and rates once, in about four seconds, and agree on the result.

    phase       ranks, all at the same time                        seconds at most
    within      rank 0 <-> 1, 2 <-> 3, ... of every node           0.2
                rank 0 <-> the last one, if their number is odd    0.2
    between     first rank of node 0 <-> 1, 2 <-> 3, ...           0.4, and 0.2 to rest
                that of node 0 <-> the last one, likewise          0.4, and 0.2 to rest
    allreduce   all                                                0.4, and as long again; and to
                                                                   agree on its time
    agreement   all                                                9 log2 P latencies, 3 if long
    cores       all: which ranks share cores                       one allgather
    rates       each rank by itself                                0.8
    calls       all                                                0.8, and 0.5 to rest

Emulated links are not probed, as their figures are known.

The slowest direction of the slowest pair, and the slowest rank, count: a collective waits for them.
On top come the latency of a few allgathers, and on long links that of a dozen runs of each probe.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from .. import wire
from ..algorithms.conservation import intersect, rounding_error, sum_vectors
from ..cost import Link, dense_bytes, rounds
from ..kernels import accumulate_and_select, all_finite, contains, merge, sum_by_index
from ..transports.pacing import link_of_messages
from ..transports.transport import Transport
from ..wire import EXACT, Format
from .network import DEFAULT_RATES, CodingRate, Network, Rates, ranks_per_core
from .per_call_overhead import DENSITY, measure_calls, own_call_seconds, picks
from .probes import (
    NOT_MEASURED,
    SMALLEST_ALLREDUCE_BYTES,
    Clock,
    Prepare,
    agree_on_slowest,
    follow_swaps,
    lead_swaps,
    seconds_per_unit,
    time_agreement,
    time_allreduce,
)

WITHIN_SECONDS: Final = 0.2
BETWEEN_SECONDS: Final = 0.4
ALLREDUCE_SECONDS: Final = 0.4
SELECT_SECONDS: Final = 0.2
COPY_SECONDS: Final = 0.1
MERGE_SECONDS: Final = 0.1
SUM_SECONDS: Final = 0.1
CODE_SECONDS: Final = 0.2  # all formats together

_SMALLEST, _LARGEST = 1 << 12, 1 << 22  # elements; larger vectors do not fit a cache either
_HIGH_DENSITY: Final = 0.1  # a density at which the time per selected entry shows
_SUMMED_LISTS: Final = 8  # that are summed
# Gigabit Ethernet, for a link that was not measured.
ASSUMED_LINK: Final = Link.of(1e9, 50e-6)


@dataclass(frozen=True)
class Calibration:
    """The network and the rates of the machines, the same on every rank.

    origin: where they come from, in words.
    """

    network: Network
    rates: Rates
    origin: str


def assumed(ranks: int) -> Calibration:
    """Return the calibration that is assumed if nothing may be measured."""
    return Calibration(Network(ranks, ASSUMED_LINK), DEFAULT_RATES, "assumed, not measured")


def measure(
    transport: Transport, formats: Sequence[Format] = (EXACT,), clock: Clock = time.perf_counter
) -> Calibration:
    """Measure a calibration; every rank must call it, and gets the same."""
    begun = clock()
    network, nodes = measure_network(transport, clock)
    rates = agree_on_rates(transport, measure_rates(formats, clock))
    rates = measure_calls(transport, network, rates, clock)
    (seconds,) = agree_on_slowest(transport, [clock() - begun])
    hosts = f"{nodes} host{'s' * (nodes > 1)}"
    if transport.link is not None:
        hosts = f"one host over an {transport.link_text}"
    ranks = f"{transport.size} rank{'s' * (transport.size > 1)}"
    return Calibration(network, rates, f"measured on {ranks} of {hosts} in {seconds:.1f} s")


def agree_on_rates(transport: Transport, own: Rates) -> Rates:
    """Return the slowest of all ranks' rates; all must have measured the same formats."""
    names = [name for name in Rates._fields if name != "coding"]
    coding = [seconds for rate in own.coding.values() for seconds in rate]
    numbers = agree_on_slowest(transport, [*(getattr(own, name) for name in names), *coding])
    coding = numbers[len(names) :]
    pairs = zip(coding[::2], coding[1::2], strict=True)
    return Rates(
        coding={f: CodingRate(*pair) for f, pair in zip(own.coding, pairs, strict=True)},
        **dict(zip(names, numbers, strict=False)),
    )


def measure_network(transport: Transport, clock: Clock = time.perf_counter) -> tuple[Network, int]:
    """Return the network, and on how many nodes the ranks are."""
    node = transport.node()
    place = node.index(transport.rank)
    places = transport.gather_object([node[0], len(node)])
    nodes = sorted({first for first, _ in places})
    ranks_per_node = max(count for _, count in places)
    in_order = all(first == rank - rank % ranks_per_node for rank, (first, _) in enumerate(places))

    if transport.size == 1:
        return Network(1, Link(0.0, 0.0)), 1
    within: Link | None = None
    between: Link | None = None
    if transport.link is not None:  # an emulated link, on which each rank is a node
        between = link_of_messages(transport.link)
    else:
        heads = nodes if place == 0 else []  # one rank a node, to measure the node's whole link
        inside = _probe(transport, node, place, WITHIN_SECONDS, clock)
        across = _probe(transport, heads, nodes.index(node[0]), BETWEEN_SECONDS, clock)
        within, between = (_slowest_link(transport, link) for link in (inside, across))
    # With a single node, nothing uses the link between nodes: its own link takes that place.
    link = between or within
    assert link is not None  # there are two ranks on some node, or two nodes
    size, messages = transport.size, 2 * rounds(transport.size)
    allreduce = None
    # Decided by the agreed link, so that all ranks time the allreduce, or none does. The smallest
    # measurement has two allreduces.
    smallest = dense_bytes(SMALLEST_ALLREDUCE_BYTES, size, 1) * link.seconds_per_byte
    if 2 * (messages * link.latency_seconds + smallest) < ALLREDUCE_SECONDS:
        allreduce = time_allreduce(transport, ALLREDUCE_SECONDS, clock)
    native_bytes = transport.native_bytes()
    agreement_seconds = time_agreement(transport, clock)
    network = Network(
        ranks=size,
        between=link,
        ranks_per_node=ranks_per_node,
        within=within,
        allreduce=allreduce,
        agreement_seconds=agreement_seconds,
        native_bytes=native_bytes if native_bytes < sys.maxsize else None,
        ranks_per_core=ranks_per_core(transport),
    )
    if not in_order:
        # Any message may leave its node, and share the link with all other ranks there.
        shared = Link(link.latency_seconds, link.seconds_per_byte * ranks_per_node)
        network = network._replace(between=shared, ranks_per_node=1, within=None)
    return network, len(nodes)


def _slowest_link(transport: Transport, own: Link) -> Link | None:
    """Return the worst of the ranks' measured links; None if no rank had a partner.

    The largest burst counts, as disturbances can only hide part of a burst.
    """
    found = Link(*agree_on_slowest(transport, own))
    return None if math.isnan(found.latency_seconds) else found


def _probe(
    transport: Transport, ranks: Sequence[int], place: int, budget_seconds: float, clock: Clock
) -> Link:
    """Return the worst link between this rank, at `place` in `ranks`, and its partners there.

    Its numbers are NaN if this rank has no partner. Every rank of the transport must call it, as a
    barrier separates the rounds.
    """
    found = NOT_MEASURED
    for partner in _partners(place, len(ranks)):
        transport.barrier()
        if partner is not None and place < partner:
            found = _worse(found, lead_swaps(transport, ranks[partner], budget_seconds, clock))
        elif partner is not None:
            found = _worse(found, follow_swaps(transport, ranks[partner], clock))
    return found


def _partners(place: int, count: int) -> tuple[int | None, int | None]:
    """Return a place's partners in both rounds; the second round is for an odd count.

    0 1 2 3 4    0 <-> 1, 2 <-> 3, then 0 <-> 4
    """
    pair, last = place ^ 1, count - 1
    left_over = count > 1 and count % 2 == 1
    return (
        pair if max(place, pair) < count else None,
        last - place if left_over and place in (0, last) else None,
    )


def _worse(a: Link, b: Link) -> Link:
    # fmax ignores NaN, which stands for what was not measured.
    return Link(*(float(number) for number in np.fmax(a, b)))


def measure_rates(
    formats: Sequence[Format] = (EXACT,),
    clock: Clock = time.perf_counter,
    stopwatch: Clock = time.thread_time,
) -> Rates:
    """Return this process's own rates, in CPU time, to exclude other processes' load."""
    random = np.random.default_rng(0)

    def selection(size: int, density: float) -> Callable[[], object]:
        residual, noise = (random.random(n, np.float32) - np.float32(0.5) for n in (size, 2 * size))
        # The residual of an entry sums about 1 / density gradients before it is selected, so it is
        # larger than a gradient by the square root of that.
        noise *= np.float32(math.sqrt(density))
        update = np.zeros(size, np.float32)
        k = max(1, round(size * density))
        threshold = accumulate_and_select(residual, noise[:size], k)[1]

        def run() -> None:
            nonlocal threshold
            # A random window of longer noise: a new gradient, without the time of drawing one.
            begin = int(random.integers(size))
            gradient = noise[begin : begin + size]
            picked, threshold = accumulate_and_select(residual, gradient, k, threshold)
            residual[picked.indices] = 0
            update.fill(0)
            update[picked.indices] = picked.values

        return run

    def copying(size: int) -> Callable[[], object]:
        gradient, flat = random.random(size, np.float32), np.zeros(size, np.float32)

        def run() -> None:
            np.copyto(flat, gradient)
            np.multiply(flat, np.float32(1), out=flat)
            np.copyto(gradient, flat)

        return run

    def merging(entries: int) -> Callable[[], object]:
        k = max(1, entries // 2)
        a, b = picks(k, random), picks(k, random)

        def run() -> None:
            # What gtopk does for each merge, including the search for picks that are alive.
            merged = merge(a, b, k)
            all_finite(merged.values)
            contains(merged.indices, a.indices)

        return run

    def summing(entries: int) -> Callable[[], object]:
        lists = [picks(max(1, entries // _SUMMED_LISTS), random) for _ in range(_SUMMED_LISTS)]
        return lambda: sum_by_index(lists)

    def encoding(entries: int, format: Format) -> Callable[[], object]:
        vector = picks(entries, random)

        def run() -> None:
            rounded = wire.encode(vector, vector.entries, format).vector
            error = rounding_error(vector, rounded, format)
            # As if one of them were the earlier rounds' error.
            intersect(sum_vectors([error, error]), vector)

        return run

    def decoding(entries: int, format: Format) -> Callable[[], object]:
        vector = picks(entries, random)
        message, _ = wire.encode(vector, vector.entries, format)
        return lambda: wire.decode(message, vector, vector.entries, 0, format)

    def rate(prepare: Prepare, largest: int, budget_seconds: float) -> float:
        return seconds_per_unit(prepare, _SMALLEST, largest, budget_seconds, clock, stopwatch)

    most_entries = round(_LARGEST * 16 * DENSITY)  # entries: the k of 64 million elements
    format_seconds = CODE_SECONDS / 2 / len(formats)
    sparse_seconds, dense_seconds = (
        rate(partial(selection, density=density), _LARGEST, SELECT_SECONDS / 2)
        for density in (DENSITY, _HIGH_DENSITY)
    )
    # From two densities: the slope is the time of an entry, the rest the time of an element.
    pick_seconds = max(0.0, dense_seconds - sparse_seconds) / (_HIGH_DENSITY - DENSITY)
    swap_seconds, list_seconds, send_seconds = own_call_seconds(stopwatch, random)
    return Rates(
        select_seconds=max(0.0, sparse_seconds - DENSITY * pick_seconds),
        merge_seconds=rate(merging, most_entries, MERGE_SECONDS),
        coding={
            f: CodingRate(
                *(
                    rate(partial(work, format=f), most_entries, format_seconds)
                    for work in (encoding, decoding)
                )
            )
            for f in formats
        },
        swap_seconds=swap_seconds,
        list_seconds=list_seconds,
        copy_seconds=rate(copying, _LARGEST, COPY_SECONDS),
        sum_seconds=rate(summing, most_entries, SUM_SECONDS) / math.log2(_SUMMED_LISTS),
        pick_seconds=pick_seconds,
        send_seconds=send_seconds,
    )
