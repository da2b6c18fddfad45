"""Options of mode "adaptive-sgd": strategies, and how batches are scaled between merges.

A strategy trains replicas separately and brings them together:

adaptive  |-- mega-batch: who is free takes the next batch of its size --| merge, new sizes
k-step    |-- K steps of equal batches on every rank --| the mean of all models
elastic   |-- K steps --| replicas and center pull each other
crossbow  |-- 1 step --| the same, with the force 1 / ranks
s-sgd     |-- 1 step --| the mean of all models: the step of the mean of all gradients

Batch scaling: computes the next sizes from the updates that ranks made in a mega-batch.

The aim is that all ranks make equally many updates. The rules are pure functions: every rank
computes the same sizes.

A rank of size b makes u = share / b updates from its share of a mega-batch, so that a change of b
by db changes u by -(u/b) db. The additive rule's gain is beta u/b, and it oscillates from 2 on. The
multiplicative rule arrives in one step, where a batch's time is in proportion to its samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ..options import Options
from ..partitioning.cuts import Limits
from .weights import WEIGHTS


@dataclass(frozen=True)
class Strategy:
    """A strategy: the way ranks get batches, and the effect of a merge.

    is_dynamic: whether a rank takes the next batch when it is free; else all ranks make equally
        many steps of equal batches.
    force: the force by which replicas and center pull each other, divided by the number of ranks;
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
    """Return b u / mean u, scaled so that the first rank to reach its upper bound is at it.

    Counts that differ by one are ignored: a rank may have come just too late for another batch.
    """
    # Else sizes would never settle: updates are whole numbers.
    if max(updates) - min(updates) <= 1:
        return list(sizes)
    wanted = [size * count for size, count in zip(sizes, updates, strict=True)]
    # Only ratios matter for equal update counts: the largest sizes give the fewest updates to pay
    # for.
    scale = min(
        most / size for size, most in zip(wanted, limits.highest(), strict=True) if size > 0
    )
    return clip_to_limits([scale * size for size in wanted], limits)


def published_rule(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return b + beta (u - mean u) where that is within the bounds, and b elsewhere.

    beta is half the lower bound. Ma, Rusu, Wu and Sim 2021 (arXiv 2110.07029), algorithm 1, as
    far as it is known here. It oscillates for ever where beta u/b is 2 and more.
    """
    mean = sum(updates) / len(updates)
    following = []
    for size, count, low, high in zip(
        sizes, updates, limits.lowest(), limits.highest(), strict=True
    ):
        wanted = round_to_grain(size + low / 2 * (count - mean), limits.grain)
        following.append(wanted if low <= wanted <= high else size)
    return following


def no_rule(sizes: Sequence[int], updates: Sequence[int], limits: Limits) -> list[int]:
    """Return the sizes as they are."""
    return list(sizes)


def round_to_grain(size: float, grain: int) -> int:
    """Return the multiple of the grain that is nearest to a size."""
    return round(size / grain) * grain


def clip_to_limits(sizes: Sequence[float], limits: Limits) -> list[int]:
    """Return whole grains within the bounds."""
    return [
        min(max(round_to_grain(size, limits.grain), low), high)
        for size, low, high in zip(sizes, limits.lowest(), limits.highest(), strict=True)
    ]


RULES: Final[Mapping[str, Rule]] = {
    "multiplicative": multiplicative,
    "published": published_rule,
    "none": no_rule,
}


BATCHES: int = 100  # in a mega-batch, by default


@dataclass(frozen=True)
class MergingOptions(Options):
    """Options of mode "adaptive-sgd"; a batch of the first size is one of global_batch / ranks.

    min_batch:    least size of a rank; 0: an eighth of its largest.
    max_batch:    largest size of this rank, and its first size where that is not less; default: the
                  first size.
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
        self._choose("algorithm", STRATEGIES)
        self._choose("batch_rule", RULES)
        self._choose("merge_weights", WEIGHTS)
        for name in ("perturbation", "merge_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.lr_scaling == "adascale":
            raise ValueError(
                "mode 'adaptive-sgd' measures no noise: use lr_scaling 'linear', 'sqrt' or 'none'"
            )
        if self.replay is not None and not STRATEGIES[self.algorithm].is_dynamic:
            raise ValueError(f"algorithm {self.algorithm!r} hands out no batches to be replayed")

    def signature(self) -> list[str]:
        """Return the options that must be equal on all ranks, as text; a record by its hash."""
        # A record may be long, and a function cannot be compared: only its presence is.
        said = "nothing" if self.replay is None else "a function"
        if isinstance(self.replay, list):
            said = hashlib.blake2b(repr(self.replay).encode(), digest_size=8).hexdigest()
        return [*super().signature(), f"replay of {said}"]
