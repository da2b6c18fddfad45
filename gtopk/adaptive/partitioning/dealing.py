"""Dealing: micro-batches are dealt to the ranks by speed; who runs out first has all dealt anew.

pass 0   rank 0 |###############|   dealt by the speeds of the pass before; it ends
         rank 1 |######..|          when one rank has none left
pass 1   rank 0 |##|                the rest, dealt by the speeds of pass 0
         rank 1 |.|                 until nothing is left: every sample once an epoch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .shares import Limits, whole


def deal(count: int, speeds: Sequence[int]) -> list[range]:
    """Return which of `count` batches each rank gets, side by side, in proportion to its speed."""
    total = sum(speeds)
    shares = whole(
        [count * speed / total for speed in speeds],
        Limits(count, [0] * len(speeds), [count] * len(speeds)),
    )
    firsts = [sum(shares[:rank]) for rank in range(len(shares))]
    return [range(first, first + share) for first, share in zip(firsts, shares, strict=True)]


def left_over(dealt: Sequence[range], done: Sequence[int]) -> list[int]:
    """Return the places of the batches that nobody has computed, in order."""
    return [place for places, n in zip(dealt, done, strict=True) for place in places[n:]]


def speeds_after(done: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return the speeds that a pass has shown; a short one shows nothing."""
    if sum(done) < 4 * len(done):
        return list(before)
    return [max(1, n) for n in done]


class Passes:
    """The micro-batches of an epoch that nobody has computed yet; the same on every rank.

    left:   of each micro-batch its places in the epoch's order.
    number: of passes that are over in this epoch.
    speeds: micro-batches that each rank computed in the last pass that was long enough to tell.
    """

    def __init__(self, ranks: int, micro_batch: int) -> None:
        self.left: list[range] = []
        self.number = 0
        self.speeds = [1] * ranks
        self._size = micro_batch
        self._dealt: list[range] = []

    def begin(self, places: Iterable[range]) -> None:
        """Begin an epoch, or what is left of one, with no pass over."""
        self.number = 0
        self.left = [
            part[first : first + self._size]
            for part in places
            for first in range(0, len(part), self._size)
        ]

    def deal(self, rank: int) -> list[range]:
        """Begin a pass; return the micro-batches that this rank has in it."""
        self._dealt = deal(len(self.left), self.speeds)
        return [self.left[place] for place in self._dealt[rank]]

    def close(self, done: Sequence[int]) -> None:
        """End a pass, in which each rank has computed the first so many of its micro-batches."""
        self.left = [self.left[place] for place in left_over(self._dealt, done)]
        self.speeds = speeds_after(done, self.speeds)
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what is left, in as few ranges as can be, and what is known of the ranks."""
        bounds: list[list[int]] = []
        for part in self.left:
            if bounds and bounds[-1][1] == part.start:
                bounds[-1][1] = part.stop
            else:
                bounds.append([part.start, part.stop])
        return {"left": bounds, "number": self.number, "speeds": list(self.speeds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; speeds are those of as many ranks, others begin with equal ones."""
        self.begin(range(start, stop) for start, stop in state["left"])
        self.number = state["number"]
        if len(state["speeds"]) == len(self.speeds):
            self.speeds = list(state["speeds"])
