"""Options of mode "adaptive-sgd": strategies, batch scaling, mega-batches.

A strategy trains replicas separately and brings them together:

adaptive  |-- mega-batch: a free rank takes the next batch of its size --| merge, new sizes
k-step    |-- K steps of equal batches on every rank --| the mean of all models
elastic   |-- K steps --| replicas and center pull each other
crossbow  |-- 1 step --| the same, with the force 1 / ranks
s-sgd     |-- 1 step --| the mean of all models: the step of the mean of all gradients

Batch scaling computes the next sizes from the updates that ranks made in a mega-batch, so that all
ranks make equally many updates. The rules are pure functions: every rank computes the same sizes.

A rank of size b makes u = share / b updates from its share of a mega-batch, so a change of b by db
changes u by -(u/b) db. The additive rule's gain is beta u/b; it oscillates from 2 on. The
multiplicative rule converges in one step if a batch's time is proportional to its samples.

Mega-batches: the stretches of samples between merges; all ranks compute the same ones.

    an epoch   |--------- mega-batch ---------|--------- mega-batch ---------|
    rank 0     |== b0 ==|== b0 ==|== b0 ==|.. merge                            sizes and weights
    rank 1     |=== b1 ===|=== b1 ===|....... merge                            from ranks' reports

Samples that no rank reports as finished, because their rank is gone, are handed out again first.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch.utils.data import Sampler

from ...errors import check_choice
from ..local_steps import WallClock
from ..options import Options
from ..partitioning.cursor import Cursor, SampleRange
from ..partitioning.cuts import Limits
from .weights import WEIGHTS, Report, equal_weights, perturb_weights


@dataclass(frozen=True)
class Strategy:
    """A strategy: how ranks get batches, and what a merge does.

    is_dynamic: whether a rank takes the next batch when it is free; else all ranks make equally
        many steps of equal batches.
    force: the force with which replicas and center pull each other, times the number of ranks;
        0: normalized merging.
    steps: steps between two merges, if not dynamic; None: the user's `local_steps`.
    """

    is_dynamic: bool = False
    force: float = 0.0
    steps: int | None = None


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "adaptive": Strategy(is_dynamic=True),
    "k-step": Strategy(),
    "elastic": Strategy(force=0.9),  # beta of Zhang, Choromanska and LeCun 2015
    "crossbow": Strategy(force=1.0, steps=1),
    "s-sgd": Strategy(steps=1),
}


# A rule maps the sizes, the ranks' updates and the limits (their total is ignored) to new sizes.
Rule = Callable[[Sequence[int], Sequence[int], Limits], list[int]]


def multiplicative(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return b u / mean u, scaled so that the first rank to reach its upper bound is at the bound.

    Counts that differ by one are ignored: a rank may have been just too late for another batch.
    """
    # Otherwise sizes would never settle, because updates are whole numbers.
    if max(updates) - min(updates) <= 1:
        return list(sizes)
    scaled = [size * count for size, count in zip(sizes, updates, strict=True)]
    # Only ratios matter for equal update counts: the largest sizes need the fewest updates.
    scale = min(
        most / size for size, most in zip(scaled, limits.highest(), strict=True) if size > 0
    )
    return clip_to_limits([scale * size for size in scaled], limits)


def published_rule(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return b + beta (u - mean u) if that is within the bounds, and b otherwise.

    beta is half the lower bound. Ma, Rusu, Wu and Sim 2021 (arXiv 2110.07029), algorithm 1, as
    far as it is known here. It oscillates for ever if beta u/b is 2 or more.
    """
    mean = sum(updates) / len(updates)
    new_sizes = []
    for size, count, low, high in zip(
        sizes, updates, limits.lowest(), limits.highest(), strict=True
    ):
        proposed = round_to_grain(size + low / 2 * (count - mean), limits.grain)
        new_sizes.append(proposed if low <= proposed <= high else size)
    return new_sizes


def no_rule(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return the sizes unchanged."""
    return list(sizes)


def round_to_grain(size: float, grain: int) -> int:
    """Return the multiple of the grain that is nearest to a size."""
    return round(size / grain) * grain


def clip_to_limits(sizes: Sequence[float], limits: Limits) -> list[int]:
    """Return the sizes in whole grains, clipped to the bounds."""
    return [
        min(max(round_to_grain(size, limits.grain), low), high)
        for size, low, high in zip(sizes, limits.lowest(), limits.highest(), strict=True)
    ]


RULES: Final[Mapping[str, Rule]] = {
    "multiplicative": multiplicative,
    "published": published_rule,
    "none": no_rule,
}


BATCHES: int = 100  # in a mega-batch by default


@dataclass(frozen=True)
class MergingOptions(Options):
    """Options of mode "adaptive-sgd"; the first size of a batch is global_batch / ranks.

    min_batch:    least size of a rank; 0: an eighth of its largest.
    max_batch:    largest size of this rank; lowers its first size if less; default: the first size.
    lr_scaling:   compares a rank's own batch with the first size.
    algorithm:    one of STRATEGIES; all but "adaptive" have equal batches and equal weights.
    mega_batch:   samples between two merges; 0: a hundred batches of the first size. More =>
                  less traffic, replicas that drift further apart. The mega-batches of an epoch are
                  about equally large.
    batch_rule:   "multiplicative", "published" (it may oscillate for ever) or "none".
    merge_weights: "updates", "samples", "published" or "equal".
    perturbation: while norms are small, the replica with the most updates gains this share of its
                  weight, and the one with the fewest loses it; published: 0.1.
    merge_momentum: momentum of the center; published: 0.9.
    local_steps:  steps between two merges of "k-step" and "elastic".
    record:       whether `loader.record` keeps all ranks' takes, for a replay.
    replay:       takes to repeat: a record, or a function; see `partitioning.cursor`.
    """

    own: ClassVar[Collection[str]] = ("max_batch", "replay")

    min_batch: int = 0
    lr_scaling: str = "linear"
    algorithm: str = "adaptive"
    mega_batch: int = 0
    batch_rule: str = "multiplicative"
    merge_weights: str = "updates"
    perturbation: float = 0.0
    merge_momentum: float = 0.0
    local_steps: int = 8
    record: bool = False
    replay: Any = None

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        super().check()
        self._require(0, "mega_batch")
        self._require(1, "local_steps")
        check_choice("algorithm", self.algorithm, STRATEGIES)
        check_choice("batch_rule", self.batch_rule, RULES)
        check_choice("merge_weights", self.merge_weights, WEIGHTS)
        for name in ("perturbation", "merge_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.lr_scaling == "adascale":
            raise ValueError(
                "mode 'adaptive-sgd' measures no noise: use lr_scaling 'linear', 'sqrt' or 'none'"
            )
        if self.replay is not None and not STRATEGIES[self.algorithm].is_dynamic:
            raise ValueError(
                f"algorithm {self.algorithm!r} hands out fixed batches: it does not support replay"
            )

    def signature(self) -> list[str]:
        """Return the options that must be equal on all ranks, as text; a record by its hash."""
        # A record may be long, so compare its hash. A function cannot be compared, only its
        # presence.
        replay_text = "nothing" if self.replay is None else "a function"
        if isinstance(self.replay, list):
            replay_text = hashlib.blake2b(repr(self.replay).encode(), digest_size=8).hexdigest()
        return [*super().signature(), f"replay of {replay_text}"]


class TakenBatches(Sampler[list[int]]):
    """Yields the indices of the batches that this rank takes; `taken` holds its takes.

    is_weightless: yield one batch without weight instead.
    """

    def __init__(self, cursor: Cursor, clock: WallClock) -> None:
        self.cursor, self._clock = cursor, clock
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
        # Taken when the DataLoader asks: with workers, prefetched takes already belong to this
        # rank.
        while take := self._take():
            self.taken.append(take)
            yield [self.order[place] for part in self.stretch.places(take) for place in part]

    def _take(self) -> range:
        with self._clock.waiting():
            return self.cursor.take(self.size)


class MegaBatches:
    """The ranks' sizes, and the places of the epoch that have not been merged yet.

    `begin` an epoch; then `open` a stretch and `close` it with all reports, until `open` is None.

    number: number of the open stretch, or of the next one; counted over all epochs.
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
    def left(self) -> list[range]:
        """Return the places of the epoch that have not been merged yet, in order."""
        return self._left.ranges

    def begin(self, places: Sequence[range]) -> None:
        """Begin an epoch, or the rest of one."""
        self._left = SampleRange(places)

    def open(self) -> SampleRange | None:
        """Return the stretch to hand out until the next merge; None at the epoch's end."""
        if not len(self._left):
            return None
        self._open = SampleRange(self._left.places(range(self._stretch_length())))
        return self._open

    def _stretch_length(self) -> int:
        options, strategy = self.options, self.strategy
        if not strategy.is_dynamic:
            return (strategy.steps or options.local_steps) * sum(self.sizes)
        mega_batch = options.mega_batch or BATCHES * self.first_size
        # Equal parts of the rest: a short last part would mean a merge after few updates.
        stretches = max(1, round(len(self._left) / mega_batch))
        return -(-len(self._left) // stretches)

    def merge_weights(self, reports: Sequence[Report]) -> list[float]:
        """Return each replica's weight in the merge, or its force; 0 if it is not finite."""
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
        # Unfinished samples go to the front, so the next stretch starts with them.
        rest = self._left.places(range(len(self._open), len(self._left)))
        self._left = SampleRange([*self._open.remaining(finished), *rest])
        self._open = SampleRange([])
        self.number += 1
        # A lost replica reports no updates, which says nothing about its rank's speed.
        if self.strategy.is_dynamic and all(report.finite for report in reports):
            updates = [report.updates for report in reports]
            self.sizes = RULES[self.options.batch_rule](self.sizes, updates, self._limits)

    def remove_rank(self, rank: int) -> None:
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
        """Load a state; with another number of ranks or global_batch, keep the first sizes."""
        self.number = state["number"]
        self._left = SampleRange([range(start, stop) for start, stop in state["left"]])
        given = self.options.global_batch
        # Sizes for other ranks, or around another first size, are no good start for these.
        if (len(state["sizes"]), state.get("global_batch", given)) == (len(self.sizes), given):
            self.sizes = clip_to_limits(state["sizes"], self._limits)
