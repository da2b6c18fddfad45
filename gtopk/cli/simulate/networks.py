"""Networks that the digits are trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from ..bench.networks import resnet18


def perceptron() -> torch.nn.Module:
    """Return a perceptron of one hidden layer: 9,610 parameters."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def convolutions() -> torch.nn.Module:
    """Return a small convolutional network in the manner of those for CIFAR-10."""
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 10),
    )


class InColor(torch.nn.Module):
    """The digits as images of three equal channels, [n, 3, 8, 8], to a network for such."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        images = pixels.reshape(-1, 1, 8, 8).expand(-1, 3, -1, -1)
        scores: torch.Tensor = self.network(images)
        return scores


def residual() -> torch.nn.Module:
    """Return the whole ResNet-18 for CIFAR-10: 11,173,962 parameters."""
    return InColor(resnet18())


NETWORKS: Final[Mapping[str, Callable[[], torch.nn.Module]]] = {
    "digits": perceptron,
    "digits-cnn": convolutions,
    "digits-resnet18": residual,
}
