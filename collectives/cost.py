"""The alpha-beta model: what each algorithm costs on a link.

alpha is the latency of a message in seconds, beta the seconds a byte takes; a rank sends and
receives at once (full duplex), and different pairs do not share a link (a switch).
Formulas: Shi et al. 2019, section II and table I, with the recursive doubling of `gtopk`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

ENTRY_BYTES = 8  # int32 index and float32 value
VALUE_BYTES = 4


class Link(NamedTuple):
    """One link between two ranks."""

    latency_seconds: float
    seconds_per_byte: float

    @classmethod
    def of(cls, bits_per_second: float, latency_seconds: float) -> Link:
        """Return the link of a bandwidth."""
        return cls(latency_seconds, 8.0 / bits_per_second)


def dense_seconds(length: int, ranks: int, link: Link) -> float:
    """Return 2 log2(P) alpha + 2(P-1)/P n beta, for `length` float32 values.

    Rabenseifner 2004: the fewest bytes there can be, in the fewest messages at that; a ring takes
    2(P-1) alpha. The model takes the better one for the baseline.
    """
    alpha, beta = link
    return 2 * rounds(ranks) * alpha + dense_bytes(length, ranks) * beta


def topk_allgather_seconds(k: int, ranks: int, link: Link) -> float:
    """Return log2(P) alpha + (P-1) k beta: everyone's k entries to everyone."""
    alpha, beta = link
    return rounds(ranks) * alpha + (ranks - 1) * k * ENTRY_BYTES * beta


def gtopk_tree_seconds(k: int, ranks: int, link: Link) -> float:
    """Return 2 log2(P) alpha + 2 log2(P) k beta: up a tree to a root, and down again."""
    alpha, beta = link
    return 2 * rounds(ranks) * (alpha + k * ENTRY_BYTES * beta)


def gtopk_seconds(k: int, ranks: int, link: Link) -> float:
    """Return log2(P) alpha + log2(P) k beta; two rounds more where P is no power of two.

    The two: ranks beyond the largest power of two hand their picks in and get the result back.
    """
    alpha, beta = link
    folded = ranks & (ranks - 1) != 0
    return (int(math.log2(ranks)) + 2 * folded) * (alpha + k * ENTRY_BYTES * beta)


def dense_bytes(length: int, ranks: int, value_bytes: int = VALUE_BYTES) -> int:
    """Return what each rank sends in a bandwidth-optimal allreduce; no algorithm sends less."""
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

    low, high = 1e3, 1e13
    if gain(low) <= 0:
        return None
    if gain(high) > 0:
        return math.inf
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if gain(middle) > 0:
            low = middle
        else:
            high = middle
    return low
