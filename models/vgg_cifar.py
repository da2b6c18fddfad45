"""VGG-16 for images of 32 x 32, with batch norm and one linear layer, like gTop-k's authors'.

image [3, 32, 32] --2 conv, halve--> [64, 16, 16] --2--> [128, 8, 8] --3--> [256, 4, 4]
    --3--> [512, 2, 2] --3--> [512, 1, 1] --linear--> classes
"""

from __future__ import annotations

from typing import Final

import torch

# Channels of each stage's convolutions; after each stage the image is halved.
STAGES: Final = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(classes: int = 10) -> torch.nn.Sequential:
    """Return VGG-16 for float32 [n, 3, 32, 32]: 14,728,266 parameters for 10 classes."""
    layers: list[torch.nn.Module] = []
    inputs = 3
    for stage in STAGES:
        for outputs in stage:
            layers += [
                torch.nn.Conv2d(inputs, outputs, 3, padding=1),
                torch.nn.BatchNorm2d(outputs),
                torch.nn.ReLU(),
            ]
            inputs = outputs
        layers.append(torch.nn.MaxPool2d(2))
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(inputs, classes))
