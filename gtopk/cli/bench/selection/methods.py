"""Methods of the host: each accumulates, selects and clears, and returns what it selected.

Those of a GPU are in measure.py. The published selectors are also here by torch's operators, for
tensors of any device: each takes a sum, float32 [n], and k, and returns the positions it selects,
int64 [about k]. They decide as `collectives.SELECTORS` do, which name the papers; the values that
they compare are rounded a little differently.

Gradients to select from: of a network in training, or drawn at random; labelled as such.

With error feedback a residual is what was not selected before, and no longer looks like a gradient.
So every source goes on from step to step, and the residual with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from collectives import SELECTORS, SparseVector, kernels
from collectives.kernels import reference
from collectives.kernels.host.calls import use_threads
from collectives.selectors import CORRECTIONS, FEWEST, FIRST, PASSES, ROUNDS, SHARE, STAGES

Array: TypeAlias = NDArray[Any]

_FEATURES, _CLASSES, _BATCH = 3072, 10, 32


class Source(Protocol):
    """A stream of gradients, float32 [length]."""

    label: str
    length: int

    def next_gradient(self) -> Array:
        """Return the gradient of the next step; its array may be the one before's."""

    def apply(self, update: SparseVector) -> None:
        """Apply the update to the network."""

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


# (residual, gradient, k) -> the picks, which are cleared in the residual.
Step = Callable[[Array, Array, int], SparseVector]

FLOOR = "a += g"
COPY = "copy"


class Method(NamedTuple):
    """One way to do a step. threads: how many it runs on, 1 unless its name says so."""

    name: str
    step: Step
    threads: int = 1


class Ours:
    """Our selection on one twin, with the threshold that it hands from step to step."""

    def __init__(self, twin: object) -> None:
        self.twin = twin
        self.threshold = 0.0

    def __call__(self, residual: Array, gradient: Array, k: int) -> SparseVector:
        twin = self.twin
        picked: SparseVector
        picked, self.threshold = twin.accumulate_and_select(  # type: ignore[attr-defined]
            residual, gradient, k, self.threshold
        )
        twin.clear_at(residual, picked.indices)  # type: ignore[attr-defined]
        return picked


def floor(residual: Array, gradient: Array, k: int) -> SparseVector:
    """Only add: the part that no method can avoid."""
    np.add(residual, gradient, out=residual)
    return SparseVector.empty(residual.size)


def copy(residual: Array, gradient: Array, k: int) -> SparseVector:
    """Only copy, which shows the memory's speed without computing."""
    np.copyto(residual, gradient)
    return SparseVector.empty(residual.size)


def torch_topk(residual: Array, gradient: Array, k: int) -> SparseVector:
    """add_, abs, torch.topk, as most implementations do it."""
    tensor = torch.from_numpy(residual)
    tensor.add_(torch.from_numpy(gradient))
    _, indices = torch.topk(tensor.abs(), k, sorted=False)
    picked = SparseVector(indices.numpy(), tensor[indices].numpy(), residual.size)
    tensor[indices] = 0
    return picked


def numpy_argpartition(residual: Array, gradient: Array, k: int) -> SparseVector:
    """+=, abs, numpy.argpartition."""
    residual += gradient
    indices = np.argpartition(np.abs(residual), residual.size - k)[residual.size - k :]
    picked = SparseVector(indices, residual[indices], residual.size)
    residual[indices] = 0
    return picked


def _approximate(name: str) -> Step:
    selector = SELECTORS[name]

    def step(residual: Array, gradient: Array, k: int) -> SparseVector:
        residual += gradient
        picked = selector(residual, k)
        residual[picked.indices] = 0
        return picked

    return step


def all_methods(threads: int) -> list[Method]:
    """Return the methods that can run here, the floor first; threads: of the threaded one."""
    methods = [Method(FLOOR, floor), Method(COPY, copy)]
    if not kernels.why_not_compiled():
        from collectives.kernels import host

        methods.append(Method("gtopk-compiled", Ours(host)))
        if threads > 1:
            methods.append(Method(f"gtopk-compiled-{threads}-threads", Ours(host), threads))
    methods.append(Method("gtopk-reference", Ours(reference)))
    methods.append(Method("torch.topk", torch_topk))
    methods.append(Method("numpy.argpartition", numpy_argpartition))
    methods.extend(Method(name, _approximate(name)) for name in SELECTORS)
    return methods


class Timed(NamedTuple):
    """One method's time in one round, and its selection, on the host."""

    picked: SparseVector
    seconds: dict[str, float]  # by each of the place's clocks


class Place(Protocol):
    """One device, with its own memory for what all methods of a round begin with."""

    device: str  # its name
    names: list[str]  # of the methods, the floor first

    def clock(self, method: str) -> str:
        """Return by which clock a method is told: "cpu", "wall" or "gpu"."""

    def begin_round(self, residual: Array, gradient: Array, k: int) -> None:
        """Take the arrays that every method is to begin with."""

    def time(self, method: str) -> Timed:
        """Run one method on a copy of the residual."""


class Host:
    """This process: the CPU seconds of its one thread, or wall seconds where there are several."""

    def __init__(self, device: str, methods: Sequence[Method]) -> None:
        self.device = device
        self._methods = {method.name: method for method in methods}
        self.names = list(self._methods)
        self._copy = np.empty(0, np.float32)

    def clock(self, method: str) -> str:
        """Return "cpu" where one thread works, else "wall"."""
        return "cpu" if self._methods[method].threads == 1 else "wall"

    def begin_round(self, residual: Array, gradient: Array, k: int) -> None:
        """Remember the arrays: they stay as they are until the round is over."""
        self._begin = residual, gradient, k
        if self._copy.size != residual.size:
            self._copy = np.empty_like(residual)

    def time(self, method: str) -> Timed:
        """Run one method by both clocks."""
        residual, gradient, k = self._begin
        step = self._methods[method]
        np.copyto(self._copy, residual)
        with use_threads(step.threads):
            begun, began = time.thread_time(), time.perf_counter()
            picked = step.step(self._copy, gradient, k)
            cpu, wall = time.thread_time() - begun, time.perf_counter() - began
        return Timed(picked, {"cpu": cpu, "wall": wall})


def wanted(names: Sequence[str], words: Sequence[str] | None) -> list[str]:
    """Return those of a place's methods that were asked for, or all; the floor is always there."""
    return [name for name in names if words is None or name in (FLOOR, *words)]


Selector = Callable[[torch.Tensor, int], torch.Tensor]


def topk(total: torch.Tensor, k: int) -> torch.Tensor:
    """abs, torch.topk, as most implementations do it; exact."""
    return torch.topk(total.abs(), k, sorted=False).indices


def sampled_dgc(total: torch.Tensor, k: int) -> torch.Tensor:
    """Take the threshold from a strided sample, lower it while it finds too few; at most k."""
    magnitudes = total.abs()
    stride = max(1, min(round(1 / SHARE), k // 2)) | 1
    sample = magnitudes[::stride]
    rank = max(1, round(k * sample.numel() / total.numel()))
    threshold = float(torch.topk(sample, rank).values[-1])
    for _ in range(ROUNDS):
        if _count(magnitudes, threshold) >= FEWEST * k:
            break
        threshold *= FEWEST
    found = _above(magnitudes, threshold)
    if found.numel() <= k:
        return found
    return found[torch.topk(magnitudes[found], k, sorted=False).indices]


def gaussian_k(total: torch.Tensor, k: int) -> torch.Tensor:
    """Fit mean and deviation, and correct the threshold a few times by half."""
    deviation, mean = (float(number) for number in torch.std_mean(total, correction=0))
    magnitudes = total.abs()
    if deviation == 0 or k == total.numel():
        return _above(magnitudes, 0.0)
    threshold = NormalDist(mean, deviation).inv_cdf(1 - k / total.numel() / 2)
    for _ in range(CORRECTIONS):
        count = _count(magnitudes, threshold)
        if count < 2 * k / 3:
            threshold *= 0.5
        elif count > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return _above(magnitudes, threshold)


def mstopk(total: torch.Tensor, k: int) -> torch.Tensor:
    """Search between mean and maximum; what is missing to k comes from just under the threshold."""
    magnitudes = total.abs()
    mean, highest = float(magnitudes.mean()), float(magnitudes.max())
    low, high = 0.0, 1.0
    too_many, enough = 0.0, highest
    for _ in range(PASSES):
        middle = (low + high) / 2
        threshold = mean + middle * (highest - mean)
        if _count(magnitudes, threshold) <= k:
            high, enough = middle, threshold
        else:
            low, too_many = middle, threshold
    sure = _above(magnitudes, enough)[:k]
    nearly = _above(magnitudes, too_many)
    spare = nearly[magnitudes[nearly] < enough][: k - sure.numel()]
    return torch.cat([sure, spare])


def sidco(total: torch.Tensor, k: int) -> torch.Tensor:
    """Fit the mean of the exceedances in each stage; the stages' shares multiply to k / n."""
    magnitudes = total.abs()
    share = k / total.numel()
    first = max(FIRST, share)
    rest = (share / first) ** (1 / STAGES)
    threshold = -float(magnitudes.mean()) * math.log(first)
    exceeding = magnitudes
    for _ in range(STAGES):
        exceeding = exceeding[exceeding > threshold]
        if not exceeding.numel():
            break
        threshold -= (float(exceeding.mean()) - threshold) * math.log(rest)
    return _above(magnitudes, threshold)


def _above(magnitudes: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.nonzero((magnitudes >= threshold) & (magnitudes > 0)).flatten()


def _count(magnitudes: torch.Tensor, threshold: float) -> int:
    return int(torch.count_nonzero(magnitudes >= threshold))


TORCH_SELECTORS: Final[dict[str, Selector]] = {
    "torch.topk": topk,
    "sampled-dgc": sampled_dgc,
    "gaussian-k": gaussian_k,
    "mstopk": mstopk,
    "sidco": sidco,
}
