"""MergingOptions: what mode "adaptive-sgd" knows."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from ..options import Options
from .batch_scaling import RULES
from .strategies import STRATEGIES
from .weights import WEIGHTS

BATCHES: int = 100  # of a mega-batch, by default


@dataclass(frozen=True)
class MergingOptions(Options):
    """What a user may turn; a batch of the first size is one of global_batch / ranks.

    min_batch:    of a rank; 0: an eighth of its largest.
    max_batch:    of this rank, and its first size where that is not less; default: the first size.
    lr_scaling:   with a rank's own batch against the first size.
    algorithm:    one of `strategies`; all but "adaptive" have equal batches, equal weights.
    mega_batch:   samples between two merges; 0: a hundred batches of the first size. More =>
                  less traffic, replicas that part further. Of an epoch all are about as large.
    batch_rule:   "multiplicative", "published" (it may swing for ever) or "none".
    merge_weights: "updates", "samples", "published" or "equal".
    perturbation: how much more the replica of the most updates weighs while norms are small, and
                  that of the fewest less; published: 0.1.
    merge_momentum: of the center; published: 0.9.
    local_steps:  between two merges of "k-step" and "elastic".
    record:       whether `loader.record` keeps all ranks' takes, for a replay.
    replay:       takes to be repeated: a record, or a function; see `cursor`.
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
        """Return what must be equal on all ranks, in words; a record by its hash."""
        said = "nothing" if self.replay is None else "a function"
        if isinstance(self.replay, list):
            said = hashlib.blake2b(repr(self.replay).encode(), digest_size=8).hexdigest()
        return [*super().signature(), f"replay of {said}"]
