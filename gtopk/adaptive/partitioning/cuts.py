"""Cuts: an epoch's order of all samples, cut into steps, and each step into the ranks' batches.

    order   |--------- step 0 ---------|--------- step 1 ---------|-- step 2 --|  the last: partial
            |  rank 0   | 1  |  rank 2 | rank 0 |   1   |  rank 2 |

For any sizes and any number of ranks, every sample is in exactly one batch of an epoch.

Dealing: micro-batches are dealt to the ranks by speed, and dealt again when a rank has none left.

pass 0   rank 0 |###############|   dealt by the speeds of the pass before; it ends
         rank 1 |######..|          when one rank has none left
pass 1   rank 0 |##|                the rest, dealt by the speeds of pass 0
         rank 1 |.|                 until nothing is left: every sample once an epoch

Rounding: a whole number of samples, divided over the ranks in whole grains and within bounds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Limits:
    """The bounds of the sizes of one step.

    total: samples of all ranks.
    low, high: bounds of each rank, inclusive.
    grain: every size is a multiple of it.
    """

    total: int
    low: Sequence[int]
    high: Sequence[int]
    grain: int = 1

    def check(self) -> None:
        """Raise ValueError if no sizes satisfy these limits."""
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
        """Return each rank's least size: `low`, rounded up to grains."""
        return [-(-low // self.grain) * self.grain for low in self.low]

    def highest(self) -> list[int]:
        """Return each rank's largest size: `high`, rounded down to grains."""
        return [high // self.grain * self.grain for high in self.high]


def clamp(ideal: Sequence[float], limits: Limits) -> list[float]:
    """Return real sizes within the bounds that sum to the total, as near to `ideal` as possible.

    Sizes are cut to the bounds. The difference to the total is then shared in proportion to the
    room that each rank has left.
    """
    low, high = limits.lowest(), limits.highest()
    sizes = [min(max(w, a), b) for w, a, b in zip(ideal, low, high, strict=True)]
    difference = limits.total - math.fsum(sizes)
    if difference > 0:
        room = [b - size for size, b in zip(sizes, high, strict=True)]
    else:
        room = [size - a for size, a in zip(sizes, low, strict=True)]
    # One pass is enough: a rank's part of the difference never exceeds its room.
    space = math.fsum(room)
    if space == 0:
        return sizes
    return [size + difference * r / space for size, r in zip(sizes, room, strict=True)]


def round_sizes(ideal: Sequence[float], limits: Limits) -> list[int]:
    """Return whole sizes near `ideal`: the largest remainder first, ties to the lower rank.

    Each size is within a grain of the one from `clamp`. Raises ValueError if no sizes satisfy the
    limits.
    """
    limits.check()
    grain, low, high = limits.grain, limits.lowest(), limits.highest()
    exact = clamp(ideal, limits)
    # A float may be slightly below the whole number it stands for, and would be rounded down by a
    # whole grain. Up to totals of 1e15 the 1e-9 never deals out too much.
    sizes = [
        min(max(math.floor(size / grain + 1e-9) * grain, a), b)
        for size, a, b in zip(exact, low, high, strict=True)
    ]
    while sum(sizes) < limits.total:
        # Never empty: the limits allow the total, and both are whole grains.
        open_ranks = [rank for rank, size in enumerate(sizes) if size + grain <= high[rank]]
        sizes[max(open_ranks, key=lambda rank: exact[rank] - sizes[rank])] += grain
    return sizes


def divide(count: int, sizes: Sequence[int]) -> list[int]:
    """Divide `count` samples in proportion to `sizes`, for the last, partial step of an epoch.

    No rank gets more than its size. Raises ValueError if `count` exceeds their sum.
    """
    total = sum(sizes)
    limits = Limits(count, [0] * len(sizes), sizes)
    return round_sizes([count * size / total if total else 0.0 for size in sizes], limits)


class Cut(NamedTuple):
    """One step: where it starts in the epoch's order, and its ranks' sizes."""

    step: int
    start: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return the number of samples in the step."""
        return sum(self.sizes)

    def share(self, rank: int) -> range:
        """Return the places of a rank's samples in the epoch's order."""
        first = self.start + sum(self.sizes[:rank])
        return range(first, first + self.sizes[rank])

    def batch(self, rank: int) -> Sequence[int]:
        """Return the places of a rank's batch: its share, or a placeholder if the share is empty.

        The placeholder is two of the step's samples, or its only sample twice: batch norm needs
        more than one.
        """
        return self.share(rank) or [self.start, self.start + min(1, self.total - 1)]


class Plan:
    """The sizes from each step on; steps are counted over all epochs.

    drawn: the number of steps cut so far; their sizes cannot change any more.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._steps = [0]
        self._sizes = [tuple(sizes)]
        self.drawn = 0

    def at(self, step: int) -> tuple[int, ...]:
        return self._sizes[bisect_right(self._steps, step) - 1]

    def change(self, step: int, sizes: Sequence[int]) -> None:
        """Set the sizes from a step on."""
        if step < max(self.drawn, self._steps[-1]):
            raise ValueError(
                f"step {step} has been cut already; sizes can change from step "
                f"{max(self.drawn, self._steps[-1])} on"
            )
        if step == self._steps[-1]:
            self._steps.pop()
            self._sizes.pop()
        self._steps.append(step)
        self._sizes.append(tuple(sizes))

    def state_dict(self, step: int) -> dict[str, Any]:
        first = bisect_right(self._steps, step) - 1
        steps = [0, *self._steps[first + 1 :]]  # the first remaining sizes apply from step 0
        return {"steps": steps, "sizes": [list(sizes) for sizes in self._sizes[first:]]}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Load another plan's sizes, from a step on."""
        self._steps = list(state["steps"])
        self._sizes = [tuple(sizes) for sizes in state["sizes"]]
        self.drawn = step


def cut_epoch(
    plan: Plan, step: int, start: int, length: int, drop_last: bool = False
) -> Iterator[Cut]:
    """Yield an epoch's steps from a position on; each reads the plan when it is drawn.

    The last one may have fewer samples than planned, divided in proportion, or be dropped.
    """
    while start < length:
        sizes = plan.at(step)
        if (left := length - start) < sum(sizes):
            if drop_last:
                return
            sizes = tuple(divide(left, sizes))
        # Before the yield: after it, a worker may already be loading this batch.
        plan.drawn = step + 1
        yield Cut(step, start, sizes)
        step, start = step + 1, start + sum(sizes)


def shuffled(length: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a permutation that depends only on seed and epoch."""
    # On the host, for any default device: all ranks must draw the same order.
    generator = torch.Generator().manual_seed(seed + epoch)
    order: list[int] = torch.randperm(length, generator=generator, device="cpu").tolist()
    return order


def split_batches(count: int, speeds: Sequence[int]) -> list[range]:
    """Return the range of `count` batches for each rank, in proportion to its speed."""
    total = sum(speeds)
    shares = round_sizes(
        [count * speed / total for speed in speeds],
        Limits(count, [0] * len(speeds), [count] * len(speeds)),
    )
    firsts = [sum(shares[:rank]) for rank in range(len(shares))]
    return [range(first, first + share) for first, share in zip(firsts, shares, strict=True)]


def uncomputed(dealt: Sequence[range], done: Sequence[int]) -> list[int]:
    """Return the places of the batches that no rank has computed, in order."""
    return [place for places, n in zip(dealt, done, strict=True) for place in places[n:]]


def speeds_after(done: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return the speeds measured in a pass; a short pass leaves them unchanged."""
    # In a shorter pass one micro-batch more or less would change a speed by a quarter or more.
    if sum(done) < 4 * len(done):
        return list(before)
    # Never 0: a rank without batches would never be measured again.
    return [max(1, n) for n in done]


class Passes:
    """The micro-batches of an epoch that no rank has computed yet; the same on every rank.

    `begin` an epoch; then `begin_pass` and `close` until `left` is empty.

    left:   the places of each micro-batch in the epoch's order.
    number: the number of passes finished in this epoch.
    speeds: micro-batches that each rank computed in the last pass that was long enough to measure.
    """

    def __init__(self, ranks: int, micro_batch: int) -> None:
        self.left: list[range] = []
        self.number = 0
        self.speeds = [1] * ranks
        self._size = micro_batch
        self._dealt: list[range] = []

    def begin(self, places: Iterable[range]) -> None:
        """Begin an epoch, or the rest of one, before its first pass."""
        self.number = 0
        self.left = [
            part[first : first + self._size]
            for part in places
            # Never across parts: a state stores ranges, and a micro-batch must be one range.
            for first in range(0, len(part), self._size)
        ]

    def begin_pass(self, rank: int) -> list[range]:
        """Begin a pass; return this rank's micro-batches in it."""
        self._dealt = split_batches(len(self.left), self.speeds)
        return [self.left[place] for place in self._dealt[rank]]

    def close(self, done: Sequence[int]) -> None:
        """End a pass in which each rank has computed its first `done` micro-batches."""
        self.left = [self.left[place] for place in uncomputed(self._dealt, done)]
        self.speeds = speeds_after(done, self.speeds)
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the remaining places, in as few ranges as possible, and the ranks' speeds."""
        bounds: list[list[int]] = []
        for part in self.left:
            if bounds and bounds[-1][1] == part.start:
                bounds[-1][1] = part.stop
            else:
                bounds.append([part.start, part.stop])
        return {"left": bounds, "number": self.number, "speeds": list(self.speeds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; with another number of ranks, speeds start equal."""
        self.begin(range(start, stop) for start, stop in state["left"])
        self.number = state["number"]
        if len(state["speeds"]) == len(self.speeds):
            self.speeds = list(state["speeds"])
