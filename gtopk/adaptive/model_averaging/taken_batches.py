"""Taken batches: what a rank takes of a mega-batch, one after the other, by the cursor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

from ..local_training.spent import Spent
from ..partitioning.cursor import Cursor, Stretch


class TakenBatches(Sampler[list[int]]):
    """The indices of the batches that this rank takes of a stretch; `taken` says which they are.

    stands_in: it yields one batch instead that is none of this rank's.
    """

    def __init__(self, cursor: Cursor, spent: Spent) -> None:
        self.cursor, self._spent = cursor, spent
        self.order: Sequence[int] = ()
        self.stretch = Stretch([])
        self.size = 0
        self.taken: deque[range] = deque()
        self.stands_in = False

    def __iter__(self) -> Iterator[list[int]]:
        self.taken.clear()
        if self.stands_in:
            yield list(self.order[: self.size])
            return
        while take := self._take():
            self.taken.append(take)
            yield [self.order[place] for part in self.stretch.places(take) for place in part]

    def _take(self) -> range:
        with self._spent.waiting():
            return self.cursor.take(self.size)
