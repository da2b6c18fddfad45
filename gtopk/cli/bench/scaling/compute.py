"""Compute: a network that computes, or one that only takes as long as the paper's workers did.

forward    |====|                      a third of the step, asleep: a GPU computes, the CPU waits
backward        |==|==|==|==|==|==|    the rest, as much for each layer, whose gradients are there
                   g6 g5 g4 g3 g2 g1   when its share is over, as hooks and overlap need it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..networks import NETWORKS
from .layers import LAYERS, SHAPES, Layer, thinner
from .published import PUBLISHED

FORWARD_SHARE: Final = 1 / 3


class Compute(NamedTuple):
    """What a step computes. emulated: it takes its time asleep, and its gradients are random.

    scale: how many times smaller the model is than the one it stands for.
    make: the model; backward: the forward and backward pass of a batch of it.
    """

    name: str
    emulated: bool
    scale: float
    batch: int
    make: Callable[[], nn.Module]
    backward: Callable[[nn.Module], None]


class _Pass(torch.autograd.Function):
    """Return x as it is; the gradients of a layer's parameters are fixed ones, seconds later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gradients: list[torch.Tensor],
        seconds: float,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients, ctx.seconds = gradients, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return outputs[0], None, None, *(gradient.clone() for gradient in ctx.gradients)


class Emulated(nn.Module):
    """Layers of these shapes; nothing is computed."""

    def __init__(self, layers: list[Layer], step_seconds: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.zeros(shape) for shape in layer) for layer in layers
        )
        self._gradients = [
            [torch.randn(shape, generator=generator) for shape in layer] for layer in layers
        ]
        self._forward_seconds = FORWARD_SHARE * step_seconds
        self._layer_seconds = (1 - FORWARD_SHARE) * step_seconds / len(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._forward_seconds)
        for layer, gradients in zip(self.layers, self._gradients, strict=True):
            x = _Pass.apply(x, gradients, self._layer_seconds, *layer.parameters())  # type: ignore[no-untyped-call]
        return x


def emulated(model: str, scale: float, rank: int) -> Compute:
    """Return a published model, of about 1/scale of its parameters, at its workers' speed."""
    published = PUBLISHED[model]
    layers = thinner(list(LAYERS[model]()), scale)

    def backward(network: nn.Module) -> None:
        network(torch.ones(1, requires_grad=True)).sum().backward()

    return Compute(
        model,
        True,
        scale,
        published.batch,
        lambda: Emulated(layers, published.step_seconds, rank),
        backward,
    )


def shapes(model: str, rank: int) -> Compute:
    """Return parameters of these shapes whose gradients cost a copy: all else is the step's own."""
    layers = list(SHAPES[model]())

    def backward(network: nn.Module) -> None:
        network(torch.ones(1, requires_grad=True)).sum().backward()

    return Compute(model, True, 1.0, 1, lambda: Emulated(layers, 0.0, rank), backward)


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

    return Compute(model, False, 1.0, batch, make, backward)
