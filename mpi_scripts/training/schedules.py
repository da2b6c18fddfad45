"""Schedules: the learning rate during training, as a factor of the chosen rate.

stepwise     /^^^^^^^|            rises from 1/ranks, then falls at given epochs
            /        |_____|____
decaying    ^^--..__               divided by the same number in every epoch
cosine       /^^^\\_                rises from 0, then falls as half a cosine
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """A training's progress in epochs, its number of epochs, and its number of ranks."""

    epoch: float
    epochs: int
    ranks: int


Schedule = Callable[[Progress], float]


def constant(progress: Progress) -> float:
    """Return 1."""
    return 1.0


def stepwise(*milestones: int, warmup_epochs: int = 0, fall: float = 0.1) -> Schedule:
    """Return a schedule that is multiplied by `fall` at each milestone, an epoch."""

    def factor(progress: Progress) -> float:
        if progress.epoch < warmup_epochs:
            least = 1 / progress.ranks
            return least + (1 - least) * progress.epoch / warmup_epochs
        return fall ** sum(progress.epoch >= milestone for milestone in milestones)

    return factor


def decaying(share: float) -> Schedule:
    """Return a schedule that is divided by `share` at the end of every epoch."""
    return lambda progress: share ** -math.floor(progress.epoch)


def cosine(warmup_epochs: float) -> Schedule:
    """Return a schedule that rises linearly and falls as half a cosine, to 0."""

    def factor(progress: Progress) -> float:
        if progress.epoch < warmup_epochs:
            return progress.epoch / warmup_epochs
        left = (progress.epochs - progress.epoch) / max(progress.epochs - warmup_epochs, 1e-9)
        return 0.5 * (1 - math.cos(math.pi * min(1.0, max(0.0, left))))

    return factor
