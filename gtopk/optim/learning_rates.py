"""A ramp of the learning rate: compressed AdamW is most fragile in its first half of a training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from ..errors import check_count, check_number


def ramp(
    optimizer: torch.optim.Optimizer,
    steps: int,
    schedule: Callable[[int], float] | None = None,
    *,
    start: float = 0.5,
    until: float = 0.5,
) -> LambdaLR:
    """Return a scheduler that begins at a fraction of the rate and raises it linearly.

    The factor of step t is min(1, start + (1 - start) * t / (until * steps)), times schedule(t).

    optimizer: distributed or plain; the ramp leads to the rate that it has now.
    steps: of the whole training. schedule: a factor by step, as of a cosine; None: 1 throughout.
    start: the factor of the first step, above 0 to 1. until: the share of the training, above 0 to
        1, at which the ramp ends.
    Raises ValueError for a number out of its range, TypeError for a scheduler in schedule's place.
    """
    check_count("steps", steps)
    for name, value in (("start", start), ("until", until)):
        check_number(name, value)
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{name} must lie in (0, 1], got {value}")
    if schedule is not None and not callable(schedule):
        raise TypeError(
            "schedule must be a function that returns a factor for a step, got "
            f"{type(schedule).__name__}: write a scheduler's rule as one, for instance "
            "lambda t: 0.5 + 0.5 * math.cos(math.pi * t / steps) for a cosine"
        )
    if steps == 0:
        raise ValueError("steps must be at least 1, got 0")

    def factor(step: int) -> float:
        rising = min(1.0, start + (1.0 - start) * step / (until * steps))
        return rising if schedule is None else rising * schedule(step)

    return LambdaLR(optimizer, factor)
