"""LearningRate: how a step grows with its batch.

The rate is changed, never the residual: what was kept of an old gradient is applied at today's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .noise_scale import Noise

Factor = Callable[[float, Noise | None, int], float]


def adascale(s: float, noise: Noise | None, reference: int) -> float:
    """Return AdaScale's gain (V + M) / (V/s + M), between 1 and s; 1 while nothing was measured.

    V, the variance of the reference batch's gradient, and M, its mean's square. Johnson et al.
    2020, arXiv 2007.05105, section 3.
    """
    if noise is None:
        return 1.0
    variance, square = noise.variance / reference, noise.square
    return (variance + square) / (variance / s + square)


FACTORS: Final[Mapping[str, Factor]] = {
    "none": lambda s, noise, reference: 1.0,
    "linear": lambda s, noise, reference: s,
    "sqrt": lambda s, noise, reference: math.sqrt(s),
    "adascale": adascale,
}


class LearningRate:
    """Multiplies an optimizer's rates with a factor while it steps.

    factor: of the next step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaling: str, reference: int) -> None:
        self._factor = FACTORS[scaling]
        self._reference = reference
        self._rates: list[float] = []
        self.factor = 1.0
        if scaling == "none":
            return
        multiply, restore = weakref.WeakMethod(self._multiply), weakref.WeakMethod(self._restore)

        def before(optimizer: torch.optim.Optimizer, *step: Any) -> None:
            if (call := multiply()) is not None:
                call(optimizer)

        def after(optimizer: torch.optim.Optimizer, *step: Any) -> None:
            if (call := restore()) is not None:
                call(optimizer)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def scale(self, samples: int, noise: Noise | None) -> None:
        """Set the factor for a batch of so many samples over all ranks."""
        self.factor = self._factor(samples / self._reference, noise, self._reference)

    def _multiply(self, optimizer: torch.optim.Optimizer) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
