"""Compute: a network that computes, or one that only takes as long as the paper's workers did.

forward    |====|                      a third of the step, asleep: a GPU computes, the CPU waits
backward        |==|==|==|==|==|==|    the rest, cut up evenly; each piece's gradient is there
                   g6 g5 g4 g3 g2 g1   when its share is over, as hooks and overlap need it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..optimizer.networks import NETWORKS
from .published import PUBLISHED

PIECES: Final = 16
COLUMNS: Final = 512
FORWARD_SHARE: Final = 1 / 3


class Compute(NamedTuple):
    """What a step computes. emulated: it takes its time asleep, and its gradients are random.

    make: the model; backward: the forward and backward pass of a batch of it.
    """

    name: str
    emulated: bool
    batch: int
    make: Callable[[], nn.Module]
    backward: Callable[[nn.Module], None]


class _Piece(torch.autograd.Function):
    """Return x as it is; the gradient of the weight is a fixed one, some seconds later."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return outputs[0], ctx.gradient.clone(), None, None


class Emulated(nn.Module):
    """As many parameters as asked for, in pieces of one size, and a rest; nothing is computed."""

    def __init__(self, elements: int, step_seconds: float, seed: int) -> None:
        super().__init__()
        rows = elements // (PIECES * COLUMNS)
        shapes: list[tuple[int, ...]] = [(rows, COLUMNS)] * PIECES if rows else []
        if rest := elements - PIECES * COLUMNS * rows:
            shapes.append((rest,))
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self._gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        self._forward_seconds = FORWARD_SHARE * step_seconds
        self._piece_seconds = (1 - FORWARD_SHARE) * step_seconds / len(shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._forward_seconds)
        for weight, gradient in zip(self.weights, self._gradients, strict=True):
            x = _Piece.apply(x, weight, gradient, self._piece_seconds)  # type: ignore[no-untyped-call]
        return x


def emulated(model: str, scale: float, rank: int) -> Compute:
    """Return a model of the published table, of 1/scale of its size, at its workers' speed."""
    published = PUBLISHED[model]
    elements = max(1, round(published.elements / scale))

    def backward(network: nn.Module) -> None:
        network(torch.ones(1, requires_grad=True)).sum().backward()

    return Compute(
        model,
        True,
        published.batch,
        lambda: Emulated(elements, published.step_seconds, rank),
        backward,
    )


def real(model: str, batch: int, rank: int) -> Compute:
    """Return a network for images of 32 x 32, that are random."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return NETWORKS[model]()

    def backward(network: nn.Module) -> None:
        nn.functional.cross_entropy(network(images), labels).backward()

    return Compute(model, False, batch, make, backward)
