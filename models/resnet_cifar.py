"""The residual networks for images of 32 x 32 (He et al. 2016, section 4.2): ResNet-20 and deeper.

    image [3, 32, 32] --conv--> [16, 32, 32] --n blocks--> --n blocks--> [32, 16, 16]
        --n blocks--> [64, 8, 8] --mean over pixels--> [64] --linear--> classes

A network of depth 6n + 2 has three stages of n blocks; each block adds the result of two
convolutions to its input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

STAGES = (16, 32, 64)  # channels


class Block(torch.nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut without parameters (the paper's option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, stride)
        self.first_norm = torch.nn.BatchNorm2d(outputs)
        self.second = _convolution(outputs, outputs, 1)
        self.second_norm = torch.nn.BatchNorm2d(outputs)
        self.stride, self.added_channels = stride, outputs - inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return F.relu(y + self.shortcut(x))

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Return every stride-th pixel, padded with zeros to the number of output channels."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.added_channels))


class CifarResNet(torch.nn.Module):
    """float32 [n, 3, 32, 32] -> scores [n, classes]; depth: 20, 32, 44, 56, 110, ..., 6n + 2."""

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2 with n at least 1, got {depth}")
        self.stem = _convolution(3, STAGES[0], 1)
        self.stem_norm = torch.nn.BatchNorm2d(STAGES[0])
        blocks: list[Block] = []
        inputs = STAGES[0]
        for outputs in STAGES:
            for number in range((depth - 2) // 6):
                stride = 2 if number == 0 and outputs != STAGES[0] else 1
                blocks.append(Block(inputs, outputs, stride))
                inputs = outputs
        self.blocks = torch.nn.Sequential(*blocks)
        self.classifier = torch.nn.Linear(inputs, classes)
        torch.nn.init.kaiming_normal_(self.classifier.weight)
        torch.nn.init.zeros_(self.classifier.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem_norm(self.stem(x)))
        x = self.blocks(x)
        scores: torch.Tensor = self.classifier(x.mean((2, 3)))
        return scores


def resnet20(classes: int = 10) -> CifarResNet:
    """Return ResNet-20: 269,722 parameters for 10 classes."""
    return CifarResNet(20, classes)


def _convolution(inputs: int, outputs: int, stride: int) -> torch.nn.Conv2d:
    """Return a padded 3 x 3 convolution, initialised as in He et al. 2015."""
    convolution = torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    torch.nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
