"""AlexNet in one column (Krizhevsky 2014), in the form that is usual today.

image [3, 224, 224] --5 conv--> [256, 6, 6] --3 linear, two of them `hidden` wide--> classes
"""

from __future__ import annotations

import torch


def alexnet(classes: int = 1000, hidden: int = 4096) -> torch.nn.Sequential:
    """Return AlexNet for float32 [n, 3, 224, 224], or at least 63 pixels: 61,100,840 parameters.

    hidden: width of the linear layers, which have 96 % of the parameters.
    """
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 11, stride=4, padding=2),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, stride=2),
        torch.nn.Conv2d(64, 192, 5, padding=2),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, stride=2),
        torch.nn.Conv2d(192, 384, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(384, 256, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(256, 256, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, stride=2),
        torch.nn.AdaptiveAvgPool2d(6),
        torch.nn.Flatten(),
        torch.nn.Dropout(),
        torch.nn.Linear(256 * 6 * 6, hidden),
        torch.nn.ReLU(),
        torch.nn.Dropout(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, classes),
    )
