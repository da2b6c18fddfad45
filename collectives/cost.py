"""Link costs, the least bytes of an allreduce, and the break-even bandwidth of two methods.

`cost_model` predicts each algorithm's cost on a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

ERROR: Final = 0.2  # relative error of a modelled time; a forecast that is farther off is wrong
SLOWEST, FASTEST = 1e3, 1e13  # bits a second, between which a break-even is searched
NARROW: Final = 3.0  # a break-even has a number if its bounds differ by this factor at most


class Link(NamedTuple):
    """One link between two ranks: alpha seconds a message and beta seconds a byte.

    burst_bytes: bytes that pass at once after a pause, from a token bucket that fills again at the
                 link's own rate.
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
        """Return the link on which everything takes `factor` times as long."""
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

    Both map a Link to the seconds of a step. Searched from 1 kbit/s to 10 Tbit/s: infinity when
    sparse still wins at the upper end, None when it does not even win at the lower one.
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
        # Halved by ratio: the range spans ten powers of ten.
        middle = math.sqrt(low * high)
        if gain(middle) > 0:
            low = middle
        else:
            high = middle
    return low


class BreakEven(NamedTuple):
    """A break-even bandwidth and its margin.

    bits_per_second: below it sparse takes less time. None: at no bandwidth; infinity: at any.
    lowest, highest: the break-even if dense takes less or more by a factor of 1 + `ERROR`; zero: at
                     no bandwidth, infinity: at any. They are far apart where both times change
                     alike with the bandwidth.
    above: whether sparse takes less time above these bandwidths instead, as it sends more in fewer
           rounds; where the bounds differ, zero then means any bandwidth, and infinity none.
    """

    bits_per_second: float | None
    lowest: float
    highest: float
    above: bool = False

    @property
    def is_a_number(self) -> bool:
        """Tell whether the break-even is known well enough to be told as a number.

        Then times that are 6 % off move it by a fifth at most: between bounds a factor of 3 apart
        the ratio of the two times changes by 1.2 squared, so over a fifth of the bandwidth by 1.2
        to the power of 2 ln 1.2 / ln 3, which is 1.06.
        """
        return 0 < self.lowest < math.inf and self.highest <= NARROW * self.lowest


def break_even(
    dense: Callable[[Link], float], sparse: Callable[[Link], float], latency_seconds: float
) -> BreakEven:
    """Return the bandwidth at which `sparse` takes as much time as `dense`, and its margin."""
    dense, sparse = cache(dense), cache(sparse)  # searched three times over, from the same ends
    slow, fast = (Link.of(bits, latency_seconds) for bits in (SLOWEST, FASTEST))
    # Whether the ratio dense / sparse grows with the bandwidth, by more than rounding.
    above = (1 + 1e-9) * dense(slow) * sparse(fast) < dense(fast) * sparse(slow)

    def at(factor: float) -> float | None:
        def longer(link: Link) -> float:
            return factor * dense(link)

        one, other = (sparse, longer) if above else (longer, sparse)
        return break_even_bits_per_second(one, other, latency_seconds)

    edge = at(1.0)
    lowest, highest = sorted(at(factor) or 0.0 for factor in (1 / (1 + ERROR), 1 + ERROR))
    if above:
        # The two were exchanged for the search: where it says "at no bandwidth", sparse wins at
        # any.
        edge = {None: math.inf, math.inf: None}.get(edge, edge)
        if lowest == highest:  # at any bandwidth, or at none: there is no side
            return BreakEven(edge, edge or 0.0, edge or 0.0)
    return BreakEven(edge, lowest, highest, above)
