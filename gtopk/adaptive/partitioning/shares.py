"""Shares: a whole number of samples, divided over the ranks in whole grains and within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The bounds of the sizes of one step.

    total: samples of all ranks.
    low, high: of each rank, inclusive.
    grain: every size is a multiple of it.
    """

    total: int
    low: Sequence[int]
    high: Sequence[int]
    grain: int = 1

    def check(self) -> None:
        """Raise ValueError where no sizes keep to this."""
        if self.grain < 1:
            raise ValueError(f"grain must be at least 1, got {self.grain}")
        if self.total % self.grain:
            raise ValueError(
                f"the global batch must be a multiple of the grain {self.grain}, got {self.total}"
            )
        for rank, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not 0 <= low <= high:
                raise ValueError(
                    f"a rank's least and most samples must satisfy 0 <= least <= most, got {low} "
                    f"and {high} on rank {rank}"
                )
        least, most = sum(self.lowest()), sum(self.highest())
        if not least <= self.total <= most:
            raise ValueError(
                f"the ranks' bounds, in grains of {self.grain}, allow {least} to {most} samples a "
                f"step, and the global batch is {self.total}; change min_batch, max_batch or "
                "global_batch"
            )

    def lowest(self) -> list[int]:
        """Return each rank's least size: `low`, up to a grain."""
        return [-(-low // self.grain) * self.grain for low in self.low]

    def highest(self) -> list[int]:
        """Return each rank's largest size: `high`, down to a grain."""
        return [high // self.grain * self.grain for high in self.high]


def clamp(wanted: Sequence[float], limits: Limits) -> list[float]:
    """Return real sizes between the bounds, with the right sum, as near to `wanted` as can be.

    What lies outside is cut off; what is then too much or missing is shared in proportion to the
    room that each rank has left.
    """
    low, high = limits.lowest(), limits.highest()
    sizes = [min(max(w, a), b) for w, a, b in zip(wanted, low, high, strict=True)]
    missing = limits.total - math.fsum(sizes)
    if missing > 0:
        room = [b - size for size, b in zip(sizes, high, strict=True)]
    else:
        room = [size - a for size, a in zip(sizes, low, strict=True)]
    space = math.fsum(room)
    if space == 0:
        return sizes
    return [size + missing * r / space for size, r in zip(sizes, room, strict=True)]


def whole(wanted: Sequence[float], limits: Limits) -> list[int]:
    """Return whole sizes near `wanted`: the largest remainder first, ties to the lower rank.

    Each lies within a grain of what `clamp` makes of `wanted`. Raises ValueError where no sizes
    keep to the limits.
    """
    limits.check()
    grain, low, high = limits.grain, limits.lowest(), limits.highest()
    exact = clamp(wanted, limits)
    # A sum of floats may lie a hair below the whole number that it stands for: rounded down, too
    # little is dealt out, never too much.
    sizes = [
        min(max(math.floor(size / grain + 1e-9) * grain, a), b)
        for size, a, b in zip(exact, low, high, strict=True)
    ]
    while sum(sizes) < limits.total:
        may = [rank for rank, size in enumerate(sizes) if size + grain <= high[rank]]
        sizes[max(may, key=lambda rank: exact[rank] - sizes[rank])] += grain
    return sizes


def divide(count: int, sizes: Sequence[int]) -> list[int]:
    """Return `count` samples divided in proportion to `sizes`: the last, partial step of an epoch.

    No rank gets more than its size. Raises ValueError where `count` exceeds their sum.
    """
    total = sum(sizes)
    limits = Limits(count, [0] * len(sizes), sizes)
    return whole([count * size / total if total else 0.0 for size in sizes], limits)
