"""Link costs, the least bytes of an allreduce, and the break-even bandwidth of two methods.

`cost_model` predicts each algorithm's cost on a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

ERROR: Final = 0.2  # relative error of a modelled time that is still expected
SLOWEST, FASTEST = 1e3, 1e13  # bits a second: the range searched for a break-even
NARROW: Final = 3.0  # a break-even is reported as a number if its bounds are within this factor


class Link(NamedTuple):
    """A link between two ranks: latency (alpha) per message, and seconds (beta) per byte.

    burst_bytes: size of the link's token bucket: so many bytes pass at once after a pause. It
                 refills at the link's rate.
    """

    latency_seconds: float
    seconds_per_byte: float
    burst_bytes: float = 0.0

    @classmethod
    def of(cls, bits_per_second: float, latency_seconds: float) -> Link:
        """Return the link of a bandwidth."""
        return cls(latency_seconds, 8.0 / bits_per_second)

    @property
    def bits_per_second(self) -> float:
        """Return the bandwidth; infinity for a link on which bytes take no time."""
        return 8.0 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def scaled(self, factor: float) -> Link:
        """Return the link with latency and seconds per byte multiplied by a factor."""
        return self._replace(
            latency_seconds=factor * self.latency_seconds,
            seconds_per_byte=factor * self.seconds_per_byte,
        )


def dense_bytes(length: int, ranks: int, value_bytes: int = 4) -> int:
    """Return the bytes a rank sends in a bandwidth-optimal allreduce; no algorithm sends fewer."""
    return round(2 * (ranks - 1) / ranks * length * value_bytes)


def rounds(ranks: int) -> int:
    """Return ceil(log2 P)."""
    return (ranks - 1).bit_length()


def break_even_bits_per_second(
    dense: Callable[[Link], float], sparse: Callable[[Link], float], latency_seconds: float
) -> float | None:
    """Return the bandwidth below which `sparse` takes less time than `dense`.

    Both map a Link to the seconds of a step. The search is from 1 kbit/s to 10 Tbit/s: infinity if
    sparse still wins at the upper end, None if it does not even win at the lower one.
    """

    def gain(bits_per_second: float) -> float:
        link = Link.of(bits_per_second, latency_seconds)
        return dense(link) - sparse(link)

    low, high = SLOWEST, FASTEST
    if gain(low) <= 0:
        return None
    if gain(high) > 0:
        return math.inf
    while high / low > 1 + 1e-6:
        # Bisect on a log scale: the range spans ten powers of ten.
        middle = math.sqrt(low * high)
        if gain(middle) > 0:
            low = middle
        else:
            high = middle
    return low


class BreakEven(NamedTuple):
    """A break-even bandwidth and its error bounds.

    bits_per_second: sparse takes less time below it. None: at no bandwidth; infinity: at any.
    lowest, highest: the break-even if dense took less or more time by a factor of 1 + `ERROR`.
                     Zero: sparse wins at no bandwidth; infinity: at any. They are far apart if both
                     times depend on the bandwidth in much the same way.
    above: sparse takes less time above these bandwidths instead, since it sends more bytes in fewer
           rounds. If the bounds differ, zero then means any bandwidth, and infinity none.
    """

    bits_per_second: float | None
    lowest: float
    highest: float
    above: bool = False

    @property
    def is_a_number(self) -> bool:
        """Tell whether the bounds are close enough to report the break-even as a number.

        Then an error of 6 % in a time moves it by a fifth at most. Between bounds a factor of 3
        apart the ratio of the two times changes by 1.2 squared, so within a fifth of the bandwidth
        by 1.2 to the power of 2 ln 1.2 / ln 3, which is 1.06.
        """
        return 0 < self.lowest < math.inf and self.highest <= NARROW * self.lowest


def break_even(
    dense: Callable[[Link], float], sparse: Callable[[Link], float], latency_seconds: float
) -> BreakEven:
    """Return the bandwidth at which `sparse` takes as long as `dense`, with its error bounds."""
    dense, sparse = cache(dense), cache(sparse)  # three searches begin at the same bandwidths
    slow, fast = (Link.of(bits, latency_seconds) for bits in (SLOWEST, FASTEST))
    # Whether the ratio dense / sparse grows with the bandwidth, by more than rounding.
    above = (1 + 1e-9) * dense(slow) * sparse(fast) < dense(fast) * sparse(slow)

    def break_even_if(factor: float) -> float | None:
        """Return the break-even if dense took `factor` times as long."""

        def scaled_dense(link: Link) -> float:
            return factor * dense(link)

        slower, faster = (sparse, scaled_dense) if above else (scaled_dense, sparse)
        return break_even_bits_per_second(slower, faster, latency_seconds)

    middle = break_even_if(1.0)
    lowest, highest = sorted(
        break_even_if(factor) or 0.0 for factor in (1 / (1 + ERROR), 1 + ERROR)
    )
    if above:
        # The search ran with the two exchanged, so its "at none" is "at any" for sparse.
        exchanged = {None: math.inf, math.inf: None}
        middle = exchanged.get(middle, middle)
        if lowest == highest:  # at any bandwidth, or at none
            return BreakEven(middle, middle or 0.0, middle or 0.0)
    return BreakEven(middle, lowest, highest, above)
