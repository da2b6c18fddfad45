"""Probes: measurements of growing size within a budget of time.

A probe goes on to the next size, GROWTH times the last, only if the time left suffices for RUNS
runs of it, by the last one's time; otherwise the last size is as large as the time allows. So a
slow link or machine is measured at a smaller size, not for longer. The time that does not depend on
the size comes on top, as do disturbances by other processes.

A link is measured by swaps, as the rounds of a reduction use it: in both directions at once, each
timed by its receiver. Long messages are sent in pieces, and the later half gives the bandwidth:

    bytes received                           Many links of clouds and switches have a token bucket:
      |                      ..''           the first bytes after a pause (a burst) pass at once. So
      |                ..''                 all bytes / all seconds would be more than the
      |          ..''      bandwidth:        bandwidth.
      |    ..''            of this half
      | .-'
      |/ <- burst
      +------------------------------ seconds
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from ..cost import Link
from ..transports.transport import Transport
from ..vector import Array
from .schedules import Order, dense

GROWTH: Final = 8
RUNS: Final = 3  # of each size, as one may be disturbed
REPEATS: Final = 7  # runs of the smallest and the largest size, if there is time
SMALLEST_BYTES: Final = 64
LARGEST_BYTES: Final = 1 << 22
SLOWEST: Final = 8 / 1e5  # seconds of a byte: nobody trains on less than 100 kbit/s
REQUEST_BYTES: Final = 16  # of a swap's request, the number and the size of its pieces
PIECES: Final = 16  # of a swap that measures the bandwidth
SMALLEST_IN_PIECES: Final = 1 << 12
# Of a swap that measures a burst. Few pieces, as each takes CPU time; but a longer message would be
# announced before it is sent.
LARGEST_PIECE_BYTES: Final = 1 << 15
SHORT_REST_SECONDS: Final = 1e-3  # long enough for a processor to be as slow as after any rest
AGREEMENT_BYTES: Final = 16  # of each rank's message
AGREEMENT_SECONDS: Final = 0.1
SMALLEST_ALLREDUCE_BYTES: Final = 1 << 14  # smaller ones may take fewer messages
LONG_ALLREDUCE_BYTES: Final = 1 << 19
NOT_MEASURED: Final = Link(math.nan, math.nan, math.nan)

Clock = Callable[[], float]
Prepare = Callable[[int], Callable[[], object]]  # of a size, to the function to time
Samples = dict[int, list[float]]  # by size: seconds of each run


def grow(
    run: Callable[[int], float],
    smallest: int,
    largest: int,
    budget_seconds: float,
    slowest: float = math.inf,
) -> Samples:
    """Call `run(size)`, which returns its seconds, for growing sizes; return all its results.

    slowest: the most seconds that a unit of size can take.
    Time is counted only by the seconds that `run` returns: ranks that get the same seconds make the
    same runs. The budget is for the time that grows with the size. The fixed time of a run, on a
    long link, comes on top, and then there are fewer runs. Only the shortest run of a size counts
    against the budget, so that a disturbed run does not use it up.
    """
    small = [run(smallest), run(smallest)]
    while len(small) < REPEATS and (len(small) + 1) * min(small) <= budget_seconds / 8:
        small.append(run(smallest))
    samples = {smallest: small}
    floor = min(small)
    # RUNS runs of each of about eight sizes should take at most half of the budget.
    runs = RUNS if 16 * RUNS * floor <= budget_seconds else 1
    left, size = budget_seconds, smallest
    per_unit = min(floor / smallest, slowest)
    while size < largest and left > 0:
        grown = min(GROWTH * size, largest)
        if RUNS * (grown - smallest) * per_unit > left:
            grown = smallest + int(left / (RUNS * per_unit)) // smallest * smallest
            if grown < 2 * size:
                break
        size, more = grown, grown - smallest
        seconds = samples[size] = [run(size) for _ in range(runs)]
        # A unit takes no longer than at a smaller size, unless a run was disturbed.
        while len(seconds) < RUNS and min(seconds) - floor > 1.25 * more * per_unit:
            seconds.append(run(size))
        per_unit = max(0.0, min(seconds) - floor) / more
        left -= runs * more * per_unit
    last, most = samples[size], REPEATS if size == largest else RUNS
    while len(last) < most and (len(last) < RUNS or (size - smallest) * per_unit <= left):
        last.append(run(size))
        left -= (size - smallest) * per_unit
    return samples


def link_of(samples: Samples) -> Link:
    """Return latency and seconds per unit of size, by the best small and the median large run."""
    sizes = sorted(samples)
    latency = min(samples[sizes[0]])
    if len(sizes) == 1:  # so slow that no larger size was tried: assume the slowest rate
        return Link(latency, latency / max(1, sizes[0]))
    # At least 0, as a disturbed small run could make the slope negative.
    slope = (statistics.median(samples[sizes[-1]]) - latency) / (sizes[-1] - sizes[0])
    return Link(max(0.0, latency - sizes[0] * max(0.0, slope)), max(0.0, slope))


def lead_swaps(transport: Transport, peer: int, budget_seconds: float, clock: Clock) -> Link:
    """Return the link from a peer that calls `follow_swaps`. Rests take half the budget on top."""
    arrivals: dict[int, list[list[float]]] = {}  # by size, and by swap: seconds until each piece

    def swap(size: int, pieces: int) -> list[float]:
        begun = clock()
        # The request counts as the first of the `size` bytes.
        request = np.array([pieces, (size - REQUEST_BYTES) // pieces], np.int64)
        transport.send(request.view(np.uint8), peer)()
        return [clock() - begun for _ in _swap(transport, peer, *request.tolist())]

    def run(size: int) -> float:
        arrived = swap(size, PIECES if size >= SMALLEST_IN_PIECES else 1)
        arrivals.setdefault(size, []).append(arrived)
        return arrived[-1]

    def burst(size: int) -> float:
        return swap(size, -(-size // LARGEST_PIECE_BYTES))[-1]

    samples = grow(run, SMALLEST_BYTES, LARGEST_BYTES, budget_seconds, SLOWEST)
    latency, per_byte, burst_bytes = link_of(samples)
    latency /= 2  # a run has two: the request's, and the swap's
    if (largest := max(samples)) >= SMALLEST_IN_PIECES:
        per_byte = _marginal_seconds_per_byte(arrivals[largest], largest)
        burst_bytes = _burst_bytes(burst, Link(latency, per_byte), largest, budget_seconds / 2)
    if burst_bytes:  # then the small swaps' bytes took no time
        latency = min(samples[SMALLEST_BYTES]) / 2
    transport.send(np.empty(0, np.uint8), peer)()  # the peer returns
    return Link(latency, per_byte, burst_bytes)


def _marginal_seconds_per_byte(arrivals: Sequence[Sequence[float]], size: int) -> float:
    """Return the median over swaps, by the later half of each one's pieces."""
    seconds = statistics.median(map(_marginal_seconds_per_piece, arrivals))
    return max(0.0, seconds) / ((size - REQUEST_BYTES) // PIECES)


def _marginal_seconds_per_piece(arrived: Sequence[float]) -> float:
    """Return the median slope between arrivals of the later half, which ignores a delayed piece.

    A network may deliver several short pieces together. Only the last piece of such a group counts,
    as then all of it has arrived. (Counting the first one of three at the beginning of the half
    measured a link 31 % too fast.)
    """
    half = PIECES // 2
    # Pieces that arrive within a quarter of the mean gap were delivered together.
    together = (arrived[-1] - arrived[0]) / (4 * PIECES)
    following = [*arrived[1:], math.inf]
    points = [
        (seconds, pieces)
        for pieces, (seconds, after) in enumerate(zip(arrived, following, strict=True), 1)
        if pieces >= half and after - seconds > together
    ]
    slopes = [(b - a) / (n - m) for (a, m), (b, n) in combinations(points, 2) if n - m >= half // 2]
    return statistics.median(slopes) if slopes else (arrived[-1] - arrived[half - 1]) / half


def _burst_bytes(
    run: Callable[[int], float], link: Link, largest: int, budget_seconds: float
) -> float:
    """Return how many bytes pass at once after a rest, from swaps that double in size.

    A swap's time is the shortest of several runs, as disturbances only lengthen it, less that of a
    swap of a few bytes. The search ends once most bytes had to wait at two sizes, or the time is
    over. A burst of less than 1/8 of a swap is ignored: it may be an error of the bandwidth.
    """
    burst, size, waited = 0.0, SMALLEST_IN_PIECES, 0
    while size <= largest / 2 and link.seconds_per_byte > 0 and waited < 2:
        rest_seconds = size * link.seconds_per_byte
        both_seconds = 2 * rest_seconds + SHORT_REST_SECONDS + 4 * link.latency_seconds
        runs = max(2, min(2 * REPEATS, int(budget_seconds / 6 / both_seconds)))
        budget_seconds -= runs * both_seconds
        if budget_seconds < 0:
            break
        small, large = [], []
        for _ in range(runs):
            time.sleep(SHORT_REST_SECONDS)
            small.append(run(SMALLEST_BYTES))
            time.sleep(rest_seconds)
            large.append(run(size))
        passed = size - (min(large) - min(small)) / link.seconds_per_byte
        if passed > size / 8:
            burst = max(burst, min(passed, size))
        waited += passed < size / 2
        size *= 2
    return burst


def follow_swaps(transport: Transport, peer: int, clock: Clock) -> Link:
    """Swap as a peer in `lead_swaps` requests; return the seconds per byte of the link from it.

    They are NaN if it never sent in pieces. So are latency and burst, which the peer measures.
    """
    arrivals: dict[int, list[list[float]]] = {}
    while (request := transport.receive(peer)).size:
        pieces, size = request.view(np.int64).tolist()
        begun = clock()
        arrived = [clock() - begun for _ in _swap(transport, peer, pieces, size)]
        if pieces == PIECES:
            arrivals.setdefault(REQUEST_BYTES + pieces * size, []).append(arrived)
    if not arrivals:
        return NOT_MEASURED
    largest = max(arrivals)
    per_byte = _marginal_seconds_per_byte(arrivals[largest], largest)
    return NOT_MEASURED._replace(seconds_per_byte=per_byte)


def _swap(transport: Transport, peer: int, pieces: int, size: int) -> Iterator[Array]:
    piece = np.zeros(size, np.uint8)
    return transport.exchange_all([(piece, peer)] * pieces, [peer] * pieces)


def time_agreement(transport: Transport, clock: Clock) -> float:
    """Return the seconds until every rank has a message of each: the median of a few runs.

    Every rank must call it; all get the mean of their times. If a run is long, there is only one.
    """
    messages = np.zeros(transport.size * AGREEMENT_BYTES, np.uint8)
    bounds = range(0, messages.size + 1, AGREEMENT_BYTES)
    runs: list[float] = []
    while len(runs) < RUNS and sum(runs) < AGREEMENT_SECONDS:
        seconds = 0.0
        for _ in range(2):
            time.sleep(SHORT_REST_SECONDS)
            begun = clock()
            transport.allgather_into(messages, bounds)
            seconds += clock() - begun
        runs.append(agree_on_mean(transport, seconds / 2))
    return statistics.median(runs)


def time_allreduce(transport: Transport, budget_seconds: float, clock: Clock) -> Link | None:
    """Return the link that fits measured allreduces: latency per message, seconds per byte sent.

    None if only short allreduces fit the time, which say little about a gradient's. Further runs of
    a size may take as long as the budget again. Every rank must call it; all get the mean of their
    times.

    Long allreduces may have more rounds than short ones, of acknowledgements. Each is assumed to
    take as long as a round of a short one; if they take most of the time, the result is None, too.
    """
    share = 2 * (transport.size - 1) / transport.size  # of the bytes that a rank sends

    def run(size: int) -> float:
        array = np.zeros(size // 4, np.float32)
        begun = clock()
        transport.allreduce(array)
        return agree_on_mean(transport, clock() - begun)

    def messages(size: int) -> int:
        order = Order(size // 4, 0, transport.size, native_bytes=transport.native_bytes())
        return sum(step.times for step in dense(order))

    samples = grow(run, SMALLEST_ALLREDUCE_BYTES, 4 * LARGEST_BYTES, budget_seconds, SLOWEST)
    largest = max(samples)
    if largest < LONG_ALLREDUCE_BYTES:
        return None
    # Measure long ones again: the first open TCP's windows, and took up to 1.5 times as long.
    long = [run(largest) for _ in range(RUNS)]
    times = messages(largest) / messages(SMALLEST_ALLREDUCE_BYTES)
    short = [times * seconds for seconds in samples[SMALLEST_ALLREDUCE_BYTES]]
    if 2 * (times - 1) / times * min(short) > statistics.median(long):
        return None
    # `times` short allreduces have as many messages as a long one.
    call = link_of({round(times * SMALLEST_ALLREDUCE_BYTES): short, largest: long})
    return Link(call.latency_seconds / messages(largest), call.seconds_per_byte / share)


def agree_on_mean(transport: Transport, seconds: float) -> float:
    """Return the mean of every rank's number, ignoring NaN.

    For the time of an operation that ranks do not begin at exactly the same time: an early rank
    waits longer by as much as a late one waits less.
    """
    gathered = transport.gather_object(seconds)
    return statistics.fmean(number for number in gathered if not math.isnan(number))


def agree_on_slowest(transport: Transport, seconds: Sequence[float]) -> list[float]:
    """Return the elementwise largest of every rank's numbers, ignoring NaN."""
    slowest = np.fmax.reduce(np.array(transport.gather_object([*seconds]), np.float64))
    return [float(number) for number in slowest]


def seconds_per_unit(
    prepare: Prepare,
    smallest: int,
    largest: int,
    budget_seconds: float,
    clock: Clock,
    stopwatch: Clock,
) -> float:
    """Return the least seconds per unit of work, at the largest size that the time allows.

    The clock counts against the budget, preparation included. The stopwatch times the work, and may
    exclude the time of other processes.
    """
    timed: Samples = {}
    prepared: dict[int, tuple[Callable[[], object], float]] = {}

    def run(size: int) -> float:
        begun = clock()
        if size not in prepared:
            # Keep the data of one size only: the next is several times as large.
            prepared.clear()
            prepared[size] = prepare(size), clock() - begun
        work, preparing_seconds = prepared[size]
        begun, work_begun = clock(), stopwatch()
        work()
        timed.setdefault(size, []).append(stopwatch() - work_begun)
        # As if every run had to prepare, so that preparing counts in the budget.
        return clock() - begun + preparing_seconds

    grow(run, smallest, largest, budget_seconds)
    size = max(timed)
    return min(timed[size]) / size  # disturbances only make a run longer
