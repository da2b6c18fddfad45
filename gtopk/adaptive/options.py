"""Options: what a user may turn, and the job that a mode makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ..world import World
from .learning_rate import FACTORS
from .policies import POLICIES
from .sources import Order
from .timing import Timer


@dataclass(frozen=True)
class Options:
    """Equal on all ranks, but for `max_batch`.

    global_batch:   samples of all ranks in a step.
    min_batch:      of a rank; lowered to an equal share where that is less.
    max_batch:      of this rank, for its memory.
    grain:          sizes are multiples of it: larger => whole tiles of a GPU, coarser balance.
    interval:       steps of a window: more => steadier, slower to follow.
    micro_batch:    of mode "abs": smaller => waits less for a round's end, more kernel launches.
    noise_every:    steps between probes of the gradient noise; 0: never. One costs a dense
                    allreduce.
    """

    global_batch: int
    min_batch: int = 8
    max_batch: int | None = None
    grain: int = 1
    interval: int = 20
    policy: str = "equal_finish"
    lr_scaling: str = "none"
    loss_reduction: str = "mean"
    seed: int = 0
    micro_batch: int = 16
    noise_every: int = 0

    def check(self) -> None:
        """Raise ValueError for an option out of its range."""
        for name in ("global_batch", "grain", "interval", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.min_batch < 0:
            raise ValueError(f"min_batch must be at least 0, got {self.min_batch}")
        if self.noise_every < 0:
            raise ValueError(f"noise_every must be at least 0, got {self.noise_every}")
        if self.max_batch is not None and self.max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {self.max_batch}")
        for name, allowed in (
            ("policy", POLICIES),
            ("lr_scaling", FACTORS),
            ("loss_reduction", ("mean", "sum")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )

    def facts(self) -> list[str]:
        """Return what must be equal on all ranks, in words."""
        return [f"{name}={value!r}" for name, value in vars(self).items() if name != "max_batch"]


@dataclass(frozen=True)
class Job:
    """What a mode is opened with.

    optimizer: a DistributedOptimizer.
    timer: what tells a batch's seconds in place of the clock, in simulations.
    """

    loader: DataLoader[Any]
    optimizer: Any
    options: Options
    world: World
    order: Order | None = None
    timer: Timer | None = None
