"""Claimed batches: what a worker takes of an epoch, as its DataLoader asks for one after another.

at first     the next places of the epoch's order, as many as the worker's size is by then
all taken    places that workers which died, or were broken off, have left undone
broken off   what was claimed and not handed out is given back to those who still compute
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

from ..local_training.spent import Spent
from .node import Node
from .options import HogbatchOptions
from .sizes import Sizer


class ClaimedBatches(Sampler[list[int]]):
    """The indices of one worker's batches; a DataLoader may ask for some ahead of the script."""

    def __init__(self, node: Node, sizer: Sizer, options: HogbatchOptions, spent: Spent) -> None:
        self._node, self._board, self._ledger = node, node.board, node.ledger
        self._sizer, self._options, self._spent = sizer, options, spent
        self._order: Sequence[int] = ()
        self._claimed: deque[Sequence[int]] = deque()  # and not handed out yet
        self._left_over: Sequence[int] = ()  # by others, and the next to be iterated

    def begin(self, order: Sequence[int]) -> None:
        """Begin an epoch, of samples in this order."""
        self._order, self._left_over = order, ()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of what is to be claimed; after `reclaim`, of that alone."""
        return self._note(self._left_over) if self._left_over else self._claim_all()

    def reclaim(self) -> bool:
        """Have the next iteration be of what others left, if anything; wait while they compute."""
        with self._spent.waiting():
            self._left_over = self._ledger.reclaim(self._sizer.size)
        return bool(self._left_over)

    def hand_out(self) -> Sequence[int]:
        """Return the places of the batch that comes next."""
        return self._claimed.popleft()

    def give_back(self) -> None:
        """Let others have what this worker has claimed and not handed out."""
        for places in self._claimed:
            self._ledger.give_back(places)
        self._claimed.clear()

    def _claim_all(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after another, as long as there is anything to claim."""
        while True:
            if self._options.lock_step:
                with self._spent.waiting():
                    self._ledger.take_turn()
            claim = self._ledger.claim(self._next_size())
            yield from self._note(claim)
            if not claim:
                break
        if self._options.lock_step:
            self._ledger.pass_turn()

    def _note(self, places: Sequence[int]) -> Iterator[list[int]]:
        if places:
            self._claimed.append(places)
            yield [self._order[place] for place in places]

    def _next_size(self) -> int:
        board = self._board
        counts = self._node.weighted_updates(self._options.beta)
        size = self._sizer.next(counts[board.me], [counts[place] for place in board.others()])
        board["size"] = size
        if self._sizer.thresholds is not None:
            board["smallest"], board["largest"] = self._sizer.thresholds
        return size
