"""Samples: how many of them a rank's gradients come from, and the weight that follows.

The number travels in the upper bits of the step's vote, so that no message is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

VOTE_BITS: Final = 35  # of the vote, below the number
MOST: Final = 2**28 - 1


class Samples:
    """What this rank says of its next gradients; None: as many samples as every other rank's.

    summed: the gradients are of a sum over samples, not of a mean.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self.summed = False

    def set(self, count: int | None, summed: bool) -> None:
        """Raise ValueError for a number that does not fit."""
        if count is not None and not 0 <= count <= MOST:
            raise ValueError(f"the number of samples must lie in 0..{MOST:,}, got {count:,}")
        self.count, self.summed = count, summed

    @property
    def facts(self) -> str:
        """Return what must be equal on all ranks."""
        if self.count is None:
            return "gradients weighted alike: no number of samples"
        return f"gradients weighted by samples, of a {'sum' if self.summed else 'mean'}"

    @property
    def vote(self) -> int:
        """Return the part of the vote that says the number."""
        return (self.count or 0) << VOTE_BITS

    def weight(self, votes: Sequence[int]) -> float:
        """Return this rank's weight, from all ranks' votes: b/B, or 1/B where a sum was taken."""
        total = sum(vote >> VOTE_BITS for vote in votes)
        if not total or not self.count:
            return 0.0
        return (1 if self.summed else self.count) / total
