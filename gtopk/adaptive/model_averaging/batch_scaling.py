"""Batch scaling: from the updates that ranks made in a mega-batch to the sizes of the next one.

The aim is that all ranks make as many updates. Pure functions: every rank computes the same sizes.

With a mega-batch of so many samples, a rank of size b makes u = share / b updates, so that a change
of b by db changes u by -(u/b) db: the additive rule's gain is beta u/b, and it swings from 2 on;
the multiplicative rule is there in one step, where a batch's time is in proportion to its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..partitioning.shares import Limits

# From the sizes, the ranks' updates and the bounds (their total is no matter) to the next sizes.
Rule = Callable[[Sequence[int], Sequence[int], Limits], list[int]]


def multiplicative(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return b u / mean u, scaled together so that the first to reach its upper bound is there.

    Counts that differ by one say nothing: a rank may have come just too late for another batch.
    """
    if max(updates) - min(updates) <= 1:
        return list(sizes)
    wanted = [size * count for size, count in zip(sizes, updates, strict=True)]
    scale = min(
        most / size for size, most in zip(wanted, limits.highest(), strict=True) if size > 0
    )
    return within([scale * size for size in wanted], limits)


def published(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return b + beta (u - mean u) where that is within the bounds, and b elsewhere.

    beta is half the lower bound. Ma, Rusu, Wu and Sim 2021 (arXiv 2110.07029), algorithm 1, as
    far as it is known here. It swings for ever where beta u/b is 2 and more.
    """
    mean = sum(updates) / len(updates)
    following = []
    for size, count, low, high in zip(
        sizes, updates, limits.lowest(), limits.highest(), strict=True
    ):
        wanted = grained(size + low / 2 * (count - mean), limits.grain)
        following.append(wanted if low <= wanted <= high else size)
    return following


def unchanged(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return the sizes as they are."""
    return list(sizes)


def grained(size: float, grain: int) -> int:
    """Return the multiple of the grain that is next to a size."""
    return round(size / grain) * grain


def within(sizes: Sequence[float], limits: Limits) -> list[int]:
    """Return whole grains within the bounds."""
    return [
        min(max(grained(size, limits.grain), low), high)
        for size, low, high in zip(sizes, limits.lowest(), limits.highest(), strict=True)
    ]


RULES: Final[Mapping[str, Rule]] = {
    "multiplicative": multiplicative,
    "published": published,
    "none": unchanged,
}
