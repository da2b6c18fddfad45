"""LearningRate: how a step grows with its batch.

The rate is changed, never the residual: what was kept of an old gradient is applied at today's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch

from .batches.current_batch import CurrentBatch
from .noise_scale import Noise

Factor = Callable[[float, Noise | None, float], float]


def adascale(s: float, noise: Noise | None, reference: float) -> float:
    """Return AdaScale's gain (V + M) / (V/s + M), between 1 and s; 1 where both are 0 or unknown.

    V, the variance of the reference batch's gradient, and M, its mean's square. Johnson et al.
    2020, arXiv 2007.05105, section 3.
    """
    if noise is None or noise.variance == noise.square == 0.0:
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
    """Has an optimizer's rates follow the samples of its batches.

    reference: the samples that the rates are meant for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaling: str, reference: float) -> None:
        self._factor = FACTORS[scaling]
        self._reference = reference
        self._current_batch = CurrentBatch.of(optimizer)

    def scale(self, samples: int, noise: Noise | None) -> None:
        """Set the factor for a batch of so many samples over all ranks."""
        self._current_batch.factor = self._factor(samples / self._reference, noise, self._reference)
