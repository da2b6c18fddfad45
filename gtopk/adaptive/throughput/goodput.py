"""Goodput: the global batch that makes most progress a second, throughput times efficiency.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..partitioning.shares import Limits
from .policies import finish_seconds
from .speed import Cost

LEAST_GAIN: Final = 0.05  # more => quieter, further from the best
MOST_CHANGE: Final = 2.0  # of the global batch at once


@dataclass(frozen=True)
class Seen:
    """What a global batch is chosen by; equal on all ranks.

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
