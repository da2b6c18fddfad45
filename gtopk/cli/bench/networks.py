"""Residual networks for images of 32 x 32 (He et al. 2016), of two sizes."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def _residual(widths: list[int], blocks: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(_Block(inputs, width, 2 if stage and not block else 1))
            inputs = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers)


def resnet20() -> nn.Module:
    """Return a network of 0.27 million parameters."""
    return _residual([16, 32, 64], 3)


def resnet18() -> nn.Module:
    """Return a network of 11.2 million parameters."""
    return _residual([64, 128, 256, 512], 2)


NETWORKS: Final = {"resnet20": resnet20, "resnet18": resnet18}
