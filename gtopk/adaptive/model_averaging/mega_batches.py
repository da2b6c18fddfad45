"""Mega-batches: the stretches of samples between merges; all ranks compute the same ones.

    an epoch   |--------- mega-batch ---------|--------- mega-batch ---------|
    rank 0     |== b0 ==|== b0 ==|== b0 ==|.. merge                            sizes, weights: by
    rank 1     |=== b1 ===|=== b1 ===|....... merge                            what ranks report

Samples that nobody reports as finished, because their rank is gone, are handed out again first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from ..local_steps import WallClock
from ..partitioning.cursor import Cursor, SampleRange
from ..partitioning.cuts import Limits
from .options import BATCHES, RULES, STRATEGIES, MergingOptions, clip_to_limits
from .weights import WEIGHTS, Report, equal_weights, perturb_weights


class TakenBatches(Sampler[list[int]]):
    """The indices of the batches that this rank takes from a stretch; `taken` holds its takes.

    is_weightless: yield one batch without weight instead.
    """

    def __init__(self, cursor: Cursor, spent: WallClock) -> None:
        self.cursor, self._spent = cursor, spent
        self.order: Sequence[int] = ()
        self.stretch = SampleRange([])
        self.size = 0
        self.taken: deque[range] = deque()
        self.is_weightless = False

    def __iter__(self) -> Iterator[list[int]]:
        self.taken.clear()
        if self.is_weightless:
            yield list(self.order[: self.size])
            return
        # Taken when the DataLoader asks: with workers, prefetched takes are this rank's already.
        while take := self._take():
            self.taken.append(take)
            yield [self.order[place] for part in self.stretch.places(take) for place in part]

    def _take(self) -> range:
        with self._spent.waiting():
            return self.cursor.take(self.size)


class MegaBatches:
    """The ranks' sizes, and the places of the epoch that are in no merge yet.

    number: number of the open stretch, or of the next one; counted through all epochs.
    """

    def __init__(self, options: MergingOptions, most: Sequence[int]) -> None:
        """most: each rank's largest size. Raises ValueError for bounds that leave no size."""
        self.options = options
        self.strategy = STRATEGIES[options.algorithm]
        self.first_size = max(1, options.global_batch // len(most))
        # The paper's default: an eighth of the largest.
        least = [options.min_batch or max(1, each // 8) for each in most]
        self._limits = Limits(0, least, most, options.grain)
        for rank, (low, high) in enumerate(
            zip(self._limits.lowest(), self._limits.highest(), strict=True)
        ):
            if not 0 < low <= high:
                raise ValueError(
                    f"rank {rank}'s batches must be from {least[rank]} to {most[rank]} samples, a "
                    f"multiple of the grain {options.grain}: there is no such size; change "
                    "min_batch, max_batch or grain"
                )
        self.sizes = clip_to_limits([self.first_size] * len(most), self._limits)
        self.number = 0
        self._left = SampleRange([])
        self._open = SampleRange([])

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return len(self.sizes)

    @property
    def left(self) -> list[range]:
        """Return the places of the epoch that are in no merge yet, in order."""
        return self._left.ranges

    def begin(self, places: Sequence[range]) -> None:
        """Begin an epoch, or what is left of one."""
        self._left = SampleRange(places)

    def open(self) -> SampleRange | None:
        """Return the stretch to hand out until the next merge; None at the epoch's end."""
        if not len(self._left):
            return None
        self._open = SampleRange(self._left.places(range(self._quota())))
        return self._open

    def _quota(self) -> int:
        options, strategy = self.options, self.strategy
        if not strategy.is_dynamic:
            return (strategy.steps or options.local_steps) * sum(self.sizes)
        wanted = options.mega_batch or BATCHES * self.first_size
        # Equal parts of what is left: a short rest would be a merge after few updates.
        stretches = max(1, round(len(self._left) / wanted))
        return -(-len(self._left) // stretches)

    def merge_weights(self, reports: Sequence[Report]) -> list[float]:
        """Return each replica's weight in the merge, or its force; 0 where it is not finite."""
        strategy, options = self.strategy, self.options
        if strategy.force:
            return [strategy.force / len(reports) * report.finite for report in reports]
        finite = [report for report in reports if report.finite]
        if not finite:
            return [0.0] * len(reports)
        rule = WEIGHTS[options.merge_weights] if strategy.is_dynamic else equal_weights
        # Among the finite replicas only, so that their weights sum to one.
        weights = iter(perturb_weights(rule(finite), finite, options.perturbation))
        return [next(weights) if report.finite else 0.0 for report in reports]

    def close(self, reports: Sequence[Report]) -> None:
        """Finish a merge: remove the samples that ranks have finished, and compute new sizes."""
        finished = [take for report in reports for take in report.takes]
        # Unfinished samples come before those that were not handed out: they are first in the next
        # stretch.
        behind = self._left.places(range(len(self._open), len(self._left)))
        self._left = SampleRange([*self._open.remaining(finished), *behind])
        self._open = SampleRange([])
        self.number += 1
        # A lost replica reports no updates, which tell nothing of its rank's speed.
        if self.strategy.is_dynamic and all(report.finite for report in reports):
            updates = [report.updates for report in reports]
            self.sizes = RULES[self.options.batch_rule](self.sizes, updates, self._limits)

    def leave(self, rank: int) -> None:
        """Remove a rank; the ranks above it move down."""
        low, high = (
            [n for r, n in enumerate(side) if r != rank]
            for side in (self._limits.low, self._limits.high)
        )
        self._limits = Limits(0, low, high, self._limits.grain)
        del self.sizes[rank]

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last merge, equal on all ranks."""
        return {
            "number": self.number,
            "global_batch": self.options.global_batch,
            "sizes": list(self.sizes),
            "left": [[place.start, place.stop] for place in self.left],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; with another number of ranks or global_batch, sizes are the first ones."""
        self.number = state["number"]
        self._left = SampleRange([range(start, stop) for start, stop in state["left"]])
        given = self.options.global_batch
        # Sizes of other ranks, or around another first size, are no start for these.
        if (len(state["sizes"]), state.get("global_batch", given)) == (self.ranks, given):
            self.sizes = clip_to_limits(state["sizes"], self._limits)
