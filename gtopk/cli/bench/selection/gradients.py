"""Gradients to select from: of a network in training, or drawn at random; labelled as such.

With error feedback a residual is what was not selected before, and no longer looks like a gradient.
So every source goes on from step to step, and the residual with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from collectives import SparseVector

Array: TypeAlias = NDArray[Any]

_FEATURES, _CLASSES, _BATCH = 3072, 10, 32


class Source(Protocol):
    """A stream of gradients, float32 [length]."""

    label: str
    length: int

    def next_gradient(self) -> Array:
        """Return the gradient of the next step; its array may be the one before's."""

    def apply(self, update: SparseVector) -> None:
        """Let the network take the step."""

    def slow_down(self, factor: float) -> None:
        """Multiply the learning rate by this, or where there is none, the gradients to come."""


class Synthetic:
    """Independent values of one distribution."""

    def __init__(self, name: str, draw: Callable[[int], Array], length: int) -> None:
        self.label = f"{name} (synthetic)"
        self.length = length
        self._draw = draw
        self._scale = np.float32(1)

    def next_gradient(self) -> Array:
        drawn = self._draw(self.length)
        drawn *= self._scale
        return drawn

    def apply(self, update: SparseVector) -> None:
        pass

    def slow_down(self, factor: float) -> None:
        self._scale *= np.float32(factor)


class Training:
    """A perceptron of about `length` parameters that learns noisy synthetic images by SGD.

    Its gradients and residuals are real, its images are not: ten random patterns under noise, a
    tenth of them under a wrong label.
    """

    def __init__(self, length: int) -> None:
        torch.manual_seed(0)
        beside = _FEATURES + _CLASSES
        hidden = max(1, round((math.sqrt(beside**2 + 4 * length) - beside) / 2))
        self._network = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, _CLASSES),
        )
        self._parameters = list(self._network.parameters())
        self.length = sum(parameter.numel() for parameter in self._parameters)
        self.label = "perceptron in training (synthetic images)"
        self._gradient = np.empty(self.length, np.float32)
        self._rate = 0.05
        self._patterns = torch.randn(_CLASSES, _FEATURES)

    def next_gradient(self) -> Array:
        classes = torch.randint(0, _CLASSES, (_BATCH,))
        images = self._patterns[classes] + 2 * torch.randn(_BATCH, _FEATURES)
        wrong = torch.rand(_BATCH) < 0.1
        labels = torch.where(wrong, torch.randint(0, _CLASSES, (_BATCH,)), classes)
        self._network.zero_grad()
        torch.nn.functional.cross_entropy(self._network(images), labels).backward()
        torch.cat(
            [p.grad.reshape(-1) for p in self._parameters if p.grad is not None],
            out=torch.from_numpy(self._gradient),
        )
        return self._gradient

    def apply(self, update: SparseVector) -> None:
        dense = torch.from_numpy(update.to_dense())
        start = 0
        with torch.no_grad():
            for parameter in self._parameters:
                step = dense[start : start + parameter.numel()]
                parameter.sub_(step.view(parameter.shape), alpha=self._rate)
                start += parameter.numel()

    def slow_down(self, factor: float) -> None:
        self._rate *= factor


def open_source(name: str, length: int) -> Source:
    """Return the source of this name: "gaussian", "laplace" or "training"."""
    if name == "training":
        return Training(length)
    random = np.random.default_rng(0)
    draw: dict[str, Callable[[int], Array]] = {
        "gaussian": lambda count: random.standard_normal(count, np.float32),
        "laplace": lambda count: _laplace(random, count),
    }
    return Synthetic(name, draw[name], length)


def _laplace(random: np.random.Generator, count: int) -> Array:
    values = random.standard_exponential(count, np.float32)
    values *= random.integers(0, 2, count, np.int8) * 2 - 1
    return values
