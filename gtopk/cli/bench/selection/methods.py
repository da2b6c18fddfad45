"""The methods of the host: each accumulates, selects and clears, and gives what it selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from collectives import SELECTORS, SparseVector, kernels
from collectives.kernels import reference

from .gradients import Array

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
    """Only add: what no method can do without."""
    np.add(residual, gradient, out=residual)
    return SparseVector.empty(residual.size)


def copy(residual: Array, gradient: Array, k: int) -> SparseVector:
    """Only copy: what the memory gives where nothing is computed."""
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
