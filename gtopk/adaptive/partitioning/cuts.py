"""Cuts: one order of all samples an epoch, cut into steps, and each step into the ranks' batches.

    order   |--------- step 0 ---------|--------- step 1 ---------|-- step 2 --|  the last: partial
            |  rank 0   | 1  |  rank 2 | rank 0 |   1   |  rank 2 |

Whatever the sizes are, and however many ranks, every sample is in exactly one batch of an epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .shares import divide


class Cut(NamedTuple):
    """One step: where it begins in the epoch's order, and its ranks' sizes."""

    step: int
    start: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return how many samples the step has."""
        return sum(self.sizes)

    def share(self, rank: int) -> range:
        """Return the places, in the epoch's order, of a rank's samples."""
        first = self.start + sum(self.sizes[:rank])
        return range(first, first + self.sizes[rank])

    def batch(self, rank: int) -> Sequence[int]:
        """Return the places of a rank's batch: its share, or what stands in for none.

        That is two of the step's samples, or its one sample twice: batch norm needs more than one.
        """
        return self.share(rank) or [self.start, self.start + min(1, self.total - 1)]


class Plan:
    """Which sizes hold from which step on; steps are counted through all epochs.

    drawn: how many steps were cut so far; their sizes cannot change any more.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._steps = [0]
        self._sizes = [tuple(sizes)]
        self.drawn = 0

    def at(self, step: int) -> tuple[int, ...]:
        """Return the sizes of a step."""
        return self._sizes[bisect_right(self._steps, step) - 1]

    def change(self, step: int, sizes: Sequence[int]) -> None:
        """Let other sizes hold from a step on."""
        if step < max(self.drawn, self._steps[-1]):
            raise ValueError(f"step {step} has been cut already, of {self.drawn}")
        if step == self._steps[-1]:
            self._steps.pop()
            self._sizes.pop()
        self._steps.append(step)
        self._sizes.append(tuple(sizes))

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what holds from a step on."""
        first = bisect_right(self._steps, step) - 1
        steps = [0, *self._steps[first + 1 :]]  # since when the first sizes hold is past
        return {"steps": steps, "sizes": [list(sizes) for sizes in self._sizes[first:]]}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Hold what another plan held, from a step on."""
        self._steps = list(state["steps"])
        self._sizes = [tuple(sizes) for sizes in state["sizes"]]
        self.drawn = step


def cut_epoch(
    plan: Plan, step: int, start: int, length: int, drop_last: bool = False
) -> Iterator[Cut]:
    """Yield an epoch's steps from a place in its order on; each asks the plan when it is due.

    The last one may have fewer samples than the plan says, divided in proportion, or be dropped.
    """
    while start < length:
        sizes = plan.at(step)
        if (left := length - start) < sum(sizes):
            if drop_last:
                return
            sizes = tuple(divide(left, sizes))
        plan.drawn = step + 1
        yield Cut(step, start, sizes)
        step, start = step + 1, start + sum(sizes)


def shuffled(length: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a permutation, equal wherever seed and epoch are."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order: list[int] = torch.randperm(length, generator=generator, device="cpu").tolist()
    return order
