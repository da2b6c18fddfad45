"""Strategies: ways to train replicas apart and bring them together, Adaptive SGD and its rivals.

adaptive  |-- mega-batch: who is free takes the next batch of its size --| merge, new sizes
k-step    |-- K steps of equal batches on every rank --| the mean of all models
elastic   |-- K steps --| replicas and center pull each other
crossbow  |-- 1 step --| the same, with the force 1 / ranks
s-sgd     |-- 1 step --| the mean of all models: the step of the mean of all gradients
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Strategy:
    """How ranks get batches, and what happens at a merge.

    is_dynamic: whether batches are handed out to whoever is free; else all ranks make as many
        steps of equal batches.
    force: with which replicas and center pull each other, divided by the ranks; 0: normalized
        merging.
    steps: between two merges, where it is not dynamic; None: as the user says.
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
