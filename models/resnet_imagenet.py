"""ResNet-50 (He et al. 2016), with a stage's stride in its 3 x 3 convolution, as is usual today.

image [3, 224, 224] --conv 7, pool--> [64, 56, 56] --3 blocks--> [256, 56, 56] --4-->
    [512, 28, 28] --6--> [1024, 14, 14] --3--> [2048, 7, 7] --mean--> [2048] --linear--> classes
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

BLOCKS: Final = (3, 4, 6, 3)
EXPANSION: Final = 4  # a block's output channels, over its inner channels


class Bottleneck(torch.nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut: 1 x 1 if shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.narrow = _normed(inputs, width, 1)
        self.look = _normed(width, width, 3, stride)
        self.widen = _normed(width, outputs, 1)
        self.shortcut: torch.nn.Module = torch.nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = _normed(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.narrow(x))
        y = self.widen(F.relu(self.look(y)))
        return F.relu(y + self.shortcut(x))


def resnet50(classes: int = 1000, width: int = 64) -> torch.nn.Sequential:
    """Return ResNet-50 for float32 [n, 3, 224, 224], or at least 32 pixels: 25,557,032 parameters.

    width: channels of the first stage's blocks; each later stage doubles it.
    """
    blocks: list[torch.nn.Module] = []
    inputs = width
    for stage, count in enumerate(BLOCKS):
        for number in range(count):
            stride = 2 if stage and number == 0 else 1
            blocks.append(Bottleneck(inputs, width << stage, stride))
            inputs = (width << stage) * EXPANSION
    return torch.nn.Sequential(
        _normed(3, width, 7, stride=2),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(inputs, classes),
    )


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> torch.nn.Sequential:
    """Return a padded convolution and its batch norm."""
    convolution = torch.nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    torch.nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(outputs))
