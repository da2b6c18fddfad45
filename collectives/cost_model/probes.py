"""Probes: small measurements that grow only as long as their time lasts.

A probe goes on to the next size, GROWTH times the last, only if the time left is enough for GOES of
it, by the last one's time; else the last size is as large as the time allows. A slow link or
machine is measured at a smaller size, never for longer. The fixed time of goes comes on top, and
disturbances by others.

A link is measured by swaps, as the rounds of a reduction use it: both ways at once, each timed
where it ends. Long ones come in pieces, and the bandwidth is that of the later ones:

    bytes that have come                     A link behind a token bucket, as many a cloud's or a
      |                      ..''           switch's is, lets the first bytes after a pause pass at
      |                ..''                 once. All bytes over all seconds would be more than
      |          ..''      bandwidth:        its bandwidth.
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
GOES: Final = 3  # goes of a size, as one may be disturbed
REPEATS: Final = 7  # at the smallest and the largest size, as far as the time lasts
SMALLEST_BYTES: Final = 64
LARGEST_BYTES: Final = 1 << 22
SLOWEST: Final = 8 / 1e5  # seconds of a byte: nobody trains on less than 100 kbit/s
WORD_BYTES: Final = 16
PIECES: Final = 16  # of a swap that measures the bandwidth
SMALLEST_IN_PIECES: Final = 1 << 12
# Of a swap that looks for a burst: as few as can be, for each takes a processor's time, too; a
# longer one would be announced before it is sent.
LARGEST_PIECE_BYTES: Final = 1 << 15
SHORT_REST_SECONDS: Final = 1e-3  # after which a processor takes as long as after any
AGREEMENT_BYTES: Final = 16  # what each rank says
AGREEMENT_SECONDS: Final = 0.1
SMALLEST_ALLREDUCE_BYTES: Final = 1 << 14  # smaller ones may take fewer messages
LONG_ALLREDUCE_BYTES: Final = 1 << 19
NOT_MEASURED: Final = Link(math.nan, math.nan, math.nan)

Clock = Callable[[], float]
Prepare = Callable[[int], Callable[[], object]]  # of a size, to the function to time
Samples = dict[int, list[float]]  # by size: seconds of each go


def grow(
    go: Callable[[int], float],
    smallest: int,
    largest: int,
    budget_seconds: float,
    slowest: float = math.inf,
) -> Samples:
    """Return the seconds that `go(size)` says it took, for growing sizes.

    slowest: the most seconds that a unit of size takes.
    Time is counted by the seconds that `go` returns, so that ranks that get the same seconds make
    the same goes. The budget is for the time that grows with size: the fixed time of a go, on a
    long link, comes on top, and then there are fewer goes. Of a size's goes the shortest counts
    against the budget, so that a disturbed one does not use it up.
    """
    small = [go(smallest), go(smallest)]
    while len(small) < REPEATS and (len(small) + 1) * min(small) <= budget_seconds / 8:
        small.append(go(smallest))
    samples = {smallest: small}
    floor = min(small)
    # Three goes of each of eight sizes or so are to take half of the budget at the most.
    goes = GOES if 16 * GOES * floor <= budget_seconds else 1
    left, size = budget_seconds, smallest
    per_unit = min(floor / smallest, slowest)
    while size < largest and left > 0:
        grown = min(GROWTH * size, largest)
        if GOES * (grown - smallest) * per_unit > left:
            grown = smallest + int(left / (GOES * per_unit)) // smallest * smallest
            if grown < 2 * size:
                break
        size, more = grown, grown - smallest
        seconds = samples[size] = [go(size) for _ in range(goes)]
        # A unit takes no longer than at a smaller size, unless a go was disturbed.
        while len(seconds) < GOES and min(seconds) - floor > 1.25 * more * per_unit:
            seconds.append(go(size))
        per_unit = max(0.0, min(seconds) - floor) / more
        left -= goes * more * per_unit
    last, most = samples[size], REPEATS if size == largest else GOES
    while len(last) < most and (len(last) < GOES or (size - smallest) * per_unit <= left):
        last.append(go(size))
        left -= (size - smallest) * per_unit
    return samples


def link_of(samples: Samples) -> Link:
    """Return latency and seconds per unit of size: the best of small goes, the median of large."""
    sizes = sorted(samples)
    latency = min(samples[sizes[0]])
    if len(sizes) == 1:  # so slow that no larger size was tried: assume the slowest rate
        return Link(latency, latency / max(1, sizes[0]))
    # Not below 0 in what follows: with a disturbed small go bytes would take less than no time.
    slope = (statistics.median(samples[sizes[-1]]) - latency) / (sizes[-1] - sizes[0])
    return Link(max(0.0, latency - sizes[0] * max(0.0, slope)), max(0.0, slope))


def lead_swaps(transport: Transport, peer: int, budget_seconds: float, clock: Clock) -> Link:
    """Return the link from a peer that follows swaps; half as long comes on top, for rests."""
    arrivals: dict[int, list[list[float]]] = {}

    def swap(size: int, pieces: int) -> list[float]:
        begun = clock()
        # The word is the first of the `size` bytes.
        word = np.array([pieces, (size - WORD_BYTES) // pieces], np.int64)
        transport.send(word.view(np.uint8), peer)()
        return [clock() - begun for _ in _swap(transport, peer, *word.tolist())]

    def go(size: int) -> float:
        come = swap(size, PIECES if size >= SMALLEST_IN_PIECES else 1)
        arrivals.setdefault(size, []).append(come)
        return come[-1]

    def burst(size: int) -> float:
        return swap(size, -(-size // LARGEST_PIECE_BYTES))[-1]

    samples = grow(go, SMALLEST_BYTES, LARGEST_BYTES, budget_seconds, SLOWEST)
    latency, per_byte, burst_bytes = link_of(samples)
    latency /= 2  # of a word, and of the swap that answers it
    if (largest := max(samples)) >= SMALLEST_IN_PIECES:
        per_byte = _marginal_seconds_per_byte(arrivals[largest], largest)
        burst_bytes = _burst_bytes(burst, Link(latency, per_byte), largest, budget_seconds / 2)
    if burst_bytes:  # the small swaps' bytes took no time either
        latency = min(samples[SMALLEST_BYTES]) / 2
    transport.send(np.empty(0, np.uint8), peer)()  # tells the peer that it is over
    return Link(latency, per_byte, burst_bytes)


def _marginal_seconds_per_byte(arrivals: Sequence[Sequence[float]], size: int) -> float:
    """Return the median of the later halves of swaps in pieces."""
    seconds = statistics.median(map(_marginal_seconds_per_piece, arrivals))
    return max(0.0, seconds) / ((size - WORD_BYTES) // PIECES)


def _marginal_seconds_per_piece(come: Sequence[float]) -> float:
    """Return the median slope between points of the later half, so that one held up does not count.

    A network hands on several short pieces together: 31 % too fast was a link whose half began
    with the first of three. What has come by then is known at the last of them.
    """
    half = PIECES // 2
    # Pieces that come within a quarter of the mean gap were handed on together.
    together = (come[-1] - come[0]) / (4 * PIECES)
    then = [*come[1:], math.inf]
    stairs = [
        (seconds, pieces)
        for pieces, (seconds, after) in enumerate(zip(come, then, strict=True), 1)
        if pieces >= half and after - seconds > together
    ]
    slopes = [(b - a) / (n - m) for (a, m), (b, n) in combinations(stairs, 2) if n - m >= half // 2]
    return statistics.median(slopes) if slopes else (come[-1] - come[half - 1]) / half


def _burst_bytes(
    go: Callable[[int], float], link: Link, largest: int, budget_seconds: float
) -> float:
    """Return how many bytes pass at once after a rest, from swaps twice as large each time.

    A swap's time is the shortest of several goes, as disturbances only lengthen it, less that of a
    swap of a few bytes. The search ends when most bytes had to wait at two sizes, or when the time
    is over. A burst of less than an eighth of a swap could be an error of the bandwidth.
    """
    burst, size, waited = 0.0, SMALLEST_IN_PIECES, 0
    while size <= largest / 2 and link.seconds_per_byte > 0 and waited < 2:
        rest_seconds = size * link.seconds_per_byte
        both_seconds = 2 * rest_seconds + SHORT_REST_SECONDS + 4 * link.latency_seconds
        goes = max(2, min(2 * REPEATS, int(budget_seconds / 6 / both_seconds)))
        budget_seconds -= goes * both_seconds
        if budget_seconds < 0:
            break
        small, large = [], []
        for _ in range(goes):
            time.sleep(SHORT_REST_SECONDS)
            small.append(go(SMALLEST_BYTES))
            time.sleep(rest_seconds)
            large.append(go(size))
        passed = size - (min(large) - min(small)) / link.seconds_per_byte
        if passed > size / 8:
            burst = max(burst, min(passed, size))
        waited += passed < size / 2
        size *= 2
    return burst


def follow_swaps(transport: Transport, peer: int, clock: Clock) -> Link:
    """Swap as a peer asks, until it ends; return the link from it, with its seconds a byte.

    They are NaN where it never sent in pieces; so are latency and burst, which the peer finds.
    """
    arrivals: dict[int, list[list[float]]] = {}
    while (word := transport.receive(peer)).size:
        pieces, size = word.view(np.int64).tolist()
        begun = clock()
        come = [clock() - begun for _ in _swap(transport, peer, pieces, size)]
        if pieces == PIECES:
            arrivals.setdefault(WORD_BYTES + pieces * size, []).append(come)
    if not arrivals:
        return NOT_MEASURED
    largest = max(arrivals)
    per_byte = _marginal_seconds_per_byte(arrivals[largest], largest)
    return NOT_MEASURED._replace(seconds_per_byte=per_byte)


def _swap(transport: Transport, peer: int, pieces: int, size: int) -> Iterator[Array]:
    piece = np.zeros(size, np.uint8)
    return transport.exchange_all([(piece, peer)] * pieces, [peer] * pieces)


def time_agreement(transport: Transport, clock: Clock) -> float:
    """Return the seconds until every rank has a message of each: the median of a few goes.

    Every rank must call it; all get the mean of their times. If a go is long, there is only one.
    """
    board = np.zeros(transport.size * AGREEMENT_BYTES, np.uint8)
    bounds = range(0, board.size + 1, AGREEMENT_BYTES)
    goes: list[float] = []
    while len(goes) < GOES and sum(goes) < AGREEMENT_SECONDS:
        took = 0.0
        for _ in range(2):
            time.sleep(SHORT_REST_SECONDS)
            begun = clock()
            transport.allgather_into(board, bounds)
            took += clock() - begun
        goes.append(agree_on_mean(transport, took / 2))
    return statistics.median(goes)


def time_allreduce(transport: Transport, budget_seconds: float, clock: Clock) -> Link | None:
    """Return the link that the transport's allreduce makes of its messages and bytes.

    Further goes of a size may take as long as the budget once more. None where only short
    allreduces fit the time, which say little about a gradient's. Every rank must call it; all get
    the mean of their times.

    Long allreduces may have more rounds than short ones, of confirmations. Each is assumed to wait
    as long as a round of a short one; the result is None, too, where they take most of the time.
    """
    share = 2 * (transport.size - 1) / transport.size  # of the bytes, to be sent by a rank

    def go(size: int) -> float:
        array = np.zeros(size // 4, np.float32)
        begun = clock()
        transport.allreduce(array)
        return agree_on_mean(transport, clock() - begun)

    def messages(size: int) -> int:
        order = Order(size // 4, 0, transport.size, native_bytes=transport.native_bytes())
        return sum(step.times for step in dense(order))

    samples = grow(go, SMALLEST_ALLREDUCE_BYTES, 4 * LARGEST_BYTES, budget_seconds, SLOWEST)
    largest = max(samples)
    if largest < LONG_ALLREDUCE_BYTES:
        return None
    # The first long ones open TCP's windows: they took up to 1.5 times as long as what followed.
    long = [go(largest) for _ in range(GOES)]
    times = messages(largest) / messages(SMALLEST_ALLREDUCE_BYTES)
    short = [times * seconds for seconds in samples[SMALLEST_ALLREDUCE_BYTES]]
    if 2 * (times - 1) / times * min(short) > statistics.median(long):
        return None
    # So many short ones have as many messages as a long one.
    call = link_of({round(times * SMALLEST_ALLREDUCE_BYTES): short, largest: long})
    return Link(call.latency_seconds / messages(largest), call.seconds_per_byte / share)


def agree_on_mean(transport: Transport, seconds: float) -> float:
    """Return the mean of every rank's number; NaN does not count.

    It is for times of operations that all ranks begin within a latency: the first ranks wait longer
    for messages by as much as the last ones wait less.
    """
    everyones = transport.gather_object(seconds)
    return statistics.fmean(number for number in everyones if not math.isnan(number))


def agree_on_slowest(transport: Transport, seconds: Sequence[float]) -> list[float]:
    """Return the largest of every rank's numbers, place by place; NaN does not count."""
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

    Preparing counts against the time, as if it were done before every go. The budget is kept by the
    clock; work is timed by the stopwatch, which may stand still while others have the processor.
    """
    timed: Samples = {}
    prepared: dict[int, tuple[Callable[[], object], float]] = {}

    def go(size: int) -> float:
        begun = clock()
        if size not in prepared:
            # The data of one size at a time: each is several times as large as the one before.
            prepared.clear()
            prepared[size] = prepare(size), clock() - begun
        work, preparing_seconds = prepared[size]
        begun, at_work = clock(), stopwatch()
        work()
        timed.setdefault(size, []).append(stopwatch() - at_work)
        return clock() - begun + preparing_seconds

    grow(go, smallest, largest, budget_seconds)
    size = max(timed)
    return min(timed[size]) / size  # disturbances only make a go longer
