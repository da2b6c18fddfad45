"""Selection methods, the gradients to select from (of a training, or random), and ranges of times.

With error feedback the residual holds the entries that were not selected before, and no longer
looks like a gradient. So each source, and its residual, continues from step to step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from collectives import SELECTORS, SparseVector
from collectives.kernels import host, reference, why_not_compiled
from collectives.vector import Array


class Range(NamedTuple):
    """Median, lowest and highest over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, decimals: int = 2) -> str:
        low, high = (f"{value:.{decimals}f}" for value in self[1:])
        return f"{self.median:.{decimals}f} ({low}-{high})"


_FEATURES, _CLASSES, _BATCH, _RATE = 3072, 10, 32, 0.05


class Synthetic:
    """A stream of gradients, float32 [length]: independent values of one distribution."""

    def __init__(self, name: str, length: int) -> None:
        """name: "gaussian" or "laplace"."""
        self.label = f"{name} (synthetic)"
        self.length = length
        self._name, self._random = name, np.random.default_rng(0)

    def next_gradient(self) -> Array:
        """Return the next step's gradient; it may reuse the last one's array."""
        if self._name == "gaussian":
            return self._random.standard_normal(self.length, np.float32)
        drawn = self._random.standard_exponential(self.length, np.float32)
        drawn *= self._random.integers(0, 2, self.length, np.int8) * 2 - 1
        return drawn

    def apply(self, update: SparseVector) -> None:
        """Apply the update to the network, if there is one."""


class Training:
    """The gradients of a perceptron of about `length` parameters that learns noisy images with SGD.

    Gradients and residuals are real, but the images are not: ten random patterns with noise, a
    tenth of them with a wrong label.
    """

    label = "perceptron in training (synthetic images)"

    def __init__(self, length: int) -> None:
        torch.manual_seed(0)
        outer = _FEATURES + _CLASSES
        # The positive root of hidden^2 + (features + classes) * hidden = length.
        hidden = max(1, round((math.sqrt(outer**2 + 4 * length) - outer) / 2))
        self._network = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, _CLASSES),
        )
        self._parameters = list(self._network.parameters())
        self.length = sum(parameter.numel() for parameter in self._parameters)
        self._gradient = np.empty(self.length, np.float32)
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
        steps = torch.from_numpy(update.to_dense()).split([p.numel() for p in self._parameters])
        with torch.no_grad():
            for parameter, step in zip(self._parameters, steps, strict=True):
                parameter.sub_(step.view(parameter.shape), alpha=_RATE)


Source = Synthetic | Training
SOURCES = ("training", "gaussian", "laplace")


def open_source(name: str, length: int) -> Source:
    """Return one of SOURCES."""
    return Training(length) if name == "training" else Synthetic(name, length)


# (residual, gradient, k) -> the picks, which it clears in the residual.
Step = Callable[[Array, Array, int], SparseVector]

# The part that no method can avoid.
FLOOR: Final = "a += g"
TWINS: Final = {"gtopk-reference": reference} | (
    {} if why_not_compiled() else {"gtopk-compiled": host}
)


class Method(NamedTuple):
    """One way to make a step; threads: how many it uses."""

    name: str
    step: Step
    threads: int = 1


class Ours:
    """Our selection with one twin, which passes its threshold on from step to step.

    guess: the threshold with which every step starts instead; None: none is given.
    """

    def __init__(self, twin: Any, guess: float | None = None) -> None:
        self._twin, self._guess, self._threshold = twin, guess, 0.0

    def __call__(self, residual: Array, gradient: Array, k: int) -> SparseVector:
        picked: SparseVector
        picked, self._threshold = self._twin.accumulate_and_select(
            residual, gradient, k, self._threshold if self._guess is None else self._guess
        )
        self._twin.clear_at(residual, picked.indices)
        return picked


def floor(residual: Array, gradient: Array, k: int) -> SparseVector:
    np.add(residual, gradient, out=residual)
    return SparseVector.empty(residual.size)


def torch_topk(residual: Array, gradient: Array, k: int) -> SparseVector:
    """add_, abs and torch.topk, as in most implementations."""
    tensor = torch.from_numpy(residual)
    tensor.add_(torch.from_numpy(gradient))
    _, indices = torch.topk(tensor.abs(), k, sorted=False)
    picked = SparseVector(indices.numpy(), tensor[indices].numpy(), residual.size)
    tensor[indices] = 0
    return picked


def _argpartition(residual: Array, gradient: Array, k: int) -> SparseVector:
    residual += gradient
    indices = np.argpartition(np.abs(residual), residual.size - k)[residual.size - k :]
    picked = SparseVector(indices, residual[indices], residual.size)
    residual[indices] = 0
    return picked


def _published(name: str, residual: Array, gradient: Array, k: int) -> SparseVector:
    residual += gradient
    picked = SELECTORS[name](residual, k)
    residual[picked.indices] = 0
    return picked


def all_methods(threads: int) -> list[Method]:
    """Return the methods that can run here, the floor first; threads: for the threaded method."""
    methods = [Method(FLOOR, floor)]
    if "gtopk-compiled" in TWINS:
        methods.append(Method("gtopk-compiled", Ours(host)))
        if threads > 1:
            methods.append(Method(f"gtopk-compiled-{threads}-threads", Ours(host), threads))
    methods += [
        Method("gtopk-reference", Ours(reference)),
        Method("torch.topk", torch_topk),
        Method("numpy.argpartition", _argpartition),
    ]
    return methods + [Method(name, partial(_published, name)) for name in SELECTORS]


class Answer:
    """The k largest magnitudes of a sum, any of equal ones; NaN counts as the largest."""

    def __init__(self, total: Array, k: int) -> None:
        self.k = k
        self.keys = reference.keys(total)
        # Keys order magnitudes as integers; NaN compares with nothing.
        self.at_k = np.partition(self.keys, total.size - k)[total.size - k]
        # Zeros may be selected or not.
        self.least = k if self.at_k else int(np.count_nonzero(self.keys))

    def is_given_by(self, picked: SparseVector) -> bool:
        """Tell whether these are k entries of the sum, apart from zeros, and no other is larger."""
        chosen = self.keys[picked.indices]
        return (
            np.unique(picked.indices).size == picked.entries <= self.k
            and int(np.count_nonzero(chosen)) == self.least
            and bool((chosen >= self.at_k).all())
            and bool((chosen == reference.keys(picked.values)).all())
        )
