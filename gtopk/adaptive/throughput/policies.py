"""Policies: from what every rank's batch took to the sizes of the next ones.

Pure functions: the same measurements give the same sizes, so that every rank computes them for
itself. They know real sizes; `shares` makes them whole.

Goodput: the global batch that makes most progress a second, by throughput times efficiency.

Pollux (Qiao et al. 2021, OSDI, arXiv 2008.12260, section 3); of M samples in a step:

    throughput    M / (compute(M) + exchange)        compute(M): ranks end together, see `policies`
    efficiency    (noise + M0) / (noise + M)         of a sample; it is 1 in the reference batch M0

    goodput |     .-----.          more samples a step hide the exchange, and teach less and less,
            |   .'       '--.      the less the smaller the gradient's noise is; where
            |  '             '     compute(M) = a + c M, best is M = sqrt(noise (a + exchange) / c)
            +------------------- M

Pollux has one batch size for all replicas; here each rank has its own share of M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..partitioning.shares import Limits, whole
from .speed import Cost


@dataclass(frozen=True)
class Measured:
    """The measurements, by rank, that sizes are chosen by.

    sizes, seconds: of the last window; a rank that had no sample has 0 and 0.
    costs: the speed models.
    """

    sizes: Sequence[int]
    seconds: Sequence[float]
    costs: Sequence[Cost]


Policy = Callable[[Measured, Limits], list[int]]


def equal_finish(measured: Measured, limits: Limits) -> list[int]:
    """Return the sizes that end the slowest rank's batch soonest.

    The level at which all ranks end together is found by filling (ranks at a bound are set aside),
    rounded down to grains; the last grains go, one by one, to the rank that would end first.

        seconds   level T  - - - - - - - - -   a_i + c_i b_i = T,  sum of b_i = total
                  |  c1 b1 |  c2 b2  | c3 b3
                  |________|   a2    |  a3     where b_i is cut off at its bounds
    """
    limits.check()
    low, high, grain = limits.lowest(), limits.highest(), limits.grain
    exact = _filled(measured.costs, limits)
    sizes = [max(math.floor(size / grain) * grain, a) for size, a in zip(exact, low, strict=True)]
    for _ in range((limits.total - sum(sizes)) // grain):
        open_ranks = [rank for rank, size in enumerate(sizes) if size + grain <= high[rank]]
        first = min(open_ranks, key=lambda rank: measured.costs[rank].seconds(sizes[rank] + grain))
        sizes[first] += grain
    return sizes


def finish_seconds(costs: Sequence[Cost], limits: Limits) -> float:
    """Return when the slowest rank ends its batch at best, in real sizes."""
    sizes = _filled(costs, limits)
    return max(cost.seconds(size) for cost, size in zip(costs, sizes, strict=True))


def _filled(costs: Sequence[Cost], limits: Limits) -> list[float]:
    """Return the sizes that end at the highest level whose sum is below the total."""
    low, high = limits.lowest(), limits.highest()

    def at(level: float) -> list[float]:
        return [
            min(max((level - cost.fixed) / cost.per_sample, a), b)
            for cost, a, b in zip(costs, low, high, strict=True)
        ]

    below, above = 0.0, max(cost.seconds(b) for cost, b in zip(costs, high, strict=True))
    while above - below > 1e-15 * above:
        middle = (below + above) / 2
        if middle in (below, above):
            break
        if math.fsum(at(middle)) < limits.total:
            below = middle
        else:
            above = middle
    return at(below)


def proportional(measured: Measured, limits: Limits) -> list[int]:
    """Return sizes in proportion to the speed of the last window.

    LB-BSP (Chen et al. 2018, arXiv 1806.02508) with the last window as the prediction of the next.
    """
    speeds = [
        size / seconds if size else 1.0 / cost.per_sample
        for size, seconds, cost in zip(
            measured.sizes, measured.seconds, measured.costs, strict=True
        )
    ]
    return whole([limits.total * speed / math.fsum(speeds) for speed in speeds], limits)


def omnilearn(measured: Measured, limits: Limits, deadband: float = 0.2) -> list[int]:
    """Return b - (b/t)(t - mean t), where one such change is larger than the dead band.

    OmniLearn's proportional controller (Tyagi and Sharma 2025, arXiv 2503.17469).
    """
    mean = math.fsum(measured.seconds) / len(measured.seconds)
    wanted = [
        size - size / seconds * (seconds - mean) if size else 0.0
        for size, seconds in zip(measured.sizes, measured.seconds, strict=True)
    ]
    wanted = [
        new if new > 0 and abs(new - old) / new >= deadband else float(old)
        for new, old in zip(wanted, measured.sizes, strict=True)
    ]
    scale = limits.total / math.fsum(wanted)
    return whole([scale * size for size in wanted], limits)


def lbb(measured: Measured, limits: Limits) -> list[int]:
    """Return LBB's next sizes: none, one grain from the slowest to the fastest, or all anew.

    By the spread of the seconds, (max - min) / mean: up to 0.05, up to 0.30, above; with the
    speed models here in place of LBB's profiles. github.com/FLYING37520/LBB.
    """
    spread = spread_of(measured.seconds)
    sizes = list(measured.sizes)
    if spread <= 0.05:
        return whole([float(size) for size in sizes], limits)
    if spread > 0.30:
        return equal_finish(measured, limits)
    ranks = range(len(sizes))
    may_give = [r for r in ranks if sizes[r] - limits.grain >= limits.lowest()[r]]
    may_take = [r for r in ranks if sizes[r] + limits.grain <= limits.highest()[r]]
    if may_give and may_take:
        slowest = max(may_give, key=lambda rank: measured.seconds[rank])
        fastest = min(may_take, key=lambda rank: measured.seconds[rank])
        sizes[slowest] -= limits.grain
        sizes[fastest] += limits.grain
    return whole([float(size) for size in sizes], limits)


def spread_of(seconds: Sequence[float]) -> float:
    """Return (max - min) / mean of the ranks that had samples: LBB's synchronization error."""
    busy = [each for each in seconds if each > 0]
    if len(busy) < 2:
        return 0.0
    return (max(busy) - min(busy)) * len(busy) / math.fsum(busy)


POLICIES: Final[Mapping[str, Policy]] = {
    "equal_finish": equal_finish,
    "proportional": proportional,
    "omnilearn": omnilearn,
    "lbb": lbb,
    "goodput": equal_finish,  # of a global batch that `goodput` chooses
}


LEAST_GAIN: Final = 0.05  # more => quieter, further from the best
MOST_CHANGE: Final = 2.0  # of the global batch at once


@dataclass(frozen=True)
class Seen:
    """The measurements that a global batch is chosen by; equal on all ranks.

    costs:            the ranks' speed models.
    exchange_seconds: what a step waits for its exchange.
    noise_scale:      of the gradient; see `noise_scale`.
    reference:        the batch whose samples count whole.
    """

    costs: Sequence[Cost]
    exchange_seconds: float
    noise_scale: float
    reference: int


def efficiency(total: int, noise_scale: float, reference: int) -> float:
    """Return what a sample is worth in a batch of `total`, where in the reference it is worth 1."""
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + reference) / (noise_scale + total)


def goodput(seen: Seen, limits: Limits) -> float:
    """Return the progress a second of batches of limits.total, in samples of the reference."""
    seconds = finish_seconds(seen.costs, limits) + seen.exchange_seconds
    total = limits.total
    return total / seconds * efficiency(total, seen.noise_scale, seen.reference)


def best_total(seen: Seen, limits_of: Callable[[int], Limits], totals: range) -> int:
    """Return the one of `totals` whose goodput is highest; where two are, the smaller.

    limits_of: a global batch's. Goodput rises, then falls: 1/goodput ~ (1 + noise/M) seconds(M),
    and seconds(M) is convex.
    """
    low, high = 0, len(totals) - 1
    while low < high:
        middle = (low + high) // 2
        here, above = (goodput(seen, limits_of(totals[place])) for place in (middle, middle + 1))
        if above > here:
            low = middle + 1
        else:
            high = middle
    return totals[low]


def next_total(seen: Seen, limits_of: Callable[[int], Limits], totals: range, now: int) -> int:
    """Return the next global batch: `now`, unless a better one is worth a change.

    It is where the expected goodput is LEAST_GAIN higher; at most MOST_CHANGE times as large, or as
    small: what was measured of this batch says less of those far off.
    """
    first = math.ceil((now / MOST_CHANGE - totals.start) / totals.step)
    last = math.floor((now * MOST_CHANGE - totals.start) / totals.step)
    near = totals[max(first, 0) : max(last + 1, 0)]
    if not near:
        return now
    best = best_total(seen, limits_of, near)
    gain = goodput(seen, limits_of(best)) / goodput(seen, limits_of(now)) - 1
    return best if gain >= LEAST_GAIN else now
