"""Probes: small measurements that grow only as long as their time lasts.

Each goes to the next size, GROWTH times the last, only if the time left is enough for GROWTH times
what the last one took: a slow link or machine is measured at a smaller size, never for longer. One
go at the smallest size is always made, and what a go is held up by others can come on top.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ..cost import Link
from ..transports.transport import Transport

GROWTH: Final = 8
REPEATS: Final = 7  # at the smallest and the largest size, as far as the time lasts
SMALLEST_BYTES: Final = 64
LARGEST_BYTES: Final = 1 << 22
SMALLEST_ALLREDUCE_BYTES: Final = 1 << 13  # smaller ones may take fewer messages
LONG_ALLREDUCE_BYTES: Final = 1 << 19

Clock = Callable[[], float]
Prepare = Callable[[int], Callable[[], object]]  # of a size, to the function to time
Samples = dict[int, list[float]]  # by size: seconds of each go


def grow(go: Callable[[int], float], smallest: int, largest: int, budget_seconds: float) -> Samples:
    """Return the seconds that `go(size)` says it took, for growing sizes.

    The time is kept by adding up what `go` says, so that ranks that are told the same seconds make
    the same goes.
    """
    samples: Samples = {}
    left = budget_seconds
    size = smallest
    while True:
        seconds = samples.setdefault(size, [])
        repeats = REPEATS if size in (smallest, largest) else REPEATS // 2
        while not seconds or (len(seconds) < repeats and seconds[-1] <= left):
            seconds.append(go(size))
            left -= seconds[-1]
        grown = min(GROWTH * size, largest)
        if grown == size or grown / size * min(seconds) > left:
            return samples
        size = grown


def link_of(samples: Samples) -> Link:
    """Return latency and seconds per unit of size: the best of small goes, the median of large."""
    sizes = sorted(samples)
    latency = min(samples[sizes[0]])
    if len(sizes) == 1:  # so slow that nothing larger was tried: as slow as it can be
        return Link(latency, latency / max(1, sizes[0]))
    slope = (statistics.median(samples[sizes[-1]]) - latency) / (sizes[-1] - sizes[0])
    return Link(max(0.0, latency - sizes[0] * max(0.0, slope)), max(0.0, slope))


def lead_ping_pong(transport: Transport, peer: int, budget_seconds: float, clock: Clock) -> Link:
    """Return the link to a peer that runs `answer_ping_pong`: half of each round trip."""

    def go(size: int) -> float:
        ball = np.zeros(size, np.uint8)
        begun = clock()
        transport.exchange(ball, peer)
        return clock() - begun

    samples = grow(go, SMALLEST_BYTES, LARGEST_BYTES, budget_seconds)
    transport.send(np.empty(0, np.uint8), peer)()  # game over
    return link_of({size: [s / 2 for s in seconds] for size, seconds in samples.items()})


def answer_ping_pong(transport: Transport, peer: int) -> None:
    """Send back what comes from a peer, until that is empty."""
    while (ball := transport.receive(peer)).size:
        transport.send(ball, peer)()


def time_allreduce(transport: Transport, budget_seconds: float, clock: Clock) -> Link | None:
    """Return seconds per call, and per byte, of the transport's allreduce.

    None where only short ones fit the time: what they take says little about a gradient's. Every
    rank must call it; all are told the time of the slowest.
    """

    def go(size: int) -> float:
        array = np.zeros(size // 4, np.float32)
        begun = clock()
        transport.allreduce(array)
        return float(agree_on_slowest(transport, [clock() - begun])[0])

    samples = grow(go, SMALLEST_ALLREDUCE_BYTES, 4 * LARGEST_BYTES, budget_seconds)
    return link_of(samples) if max(samples) >= LONG_ALLREDUCE_BYTES else None


def agree_on_slowest(transport: Transport, seconds: Sequence[float]) -> list[float]:
    """Return the largest of every rank's numbers, place by place; NaN is none."""
    mine = np.array(seconds, np.float64)
    everyones = transport.allgather(mine.view(np.uint8))
    slowest = np.fmax.reduce([message.view(np.float64) for message in everyones])
    return [float(number) for number in slowest]


def seconds_per_unit(
    prepare: Prepare,
    smallest: int,
    largest: int,
    budget_seconds: float,
    clock: Clock,
    stopwatch: Clock,
) -> float:
    """Return the median seconds per unit of work, at the largest size that the time allows.

    Preparing counts against the time, as if it were done before every go. The budget is kept by the
    clock; work is timed by the stopwatch, which may stand still while others have the processor.
    """
    timed: Samples = {}
    prepared: dict[int, tuple[Callable[[], object], float]] = {}

    def go(size: int) -> float:
        begun = clock()
        if size not in prepared:
            prepared.clear()
            prepared[size] = prepare(size), clock() - begun
        work, preparing_seconds = prepared[size]
        begun, at_work = clock(), stopwatch()
        work()
        timed.setdefault(size, []).append(stopwatch() - at_work)
        return clock() - begun + preparing_seconds

    grow(go, smallest, largest, budget_seconds)
    size = max(timed)
    return statistics.median(timed[size]) / size
