"""A small convolutional network for handwritten digits, of 8 x 8 pixels or of 28 x 28."""

from __future__ import annotations

import torch


def digits_cnn(size: int = 8, classes: int = 10) -> torch.nn.Sequential:
    """Return a network for float32 [n, 1, size, size]: 22,602 parameters at the defaults.

    size: pixels of the images' sides; a multiple of 4.
    """
    if size < 4 or size % 4:
        raise ValueError(f"size must be a multiple of 4, got {size}")
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * (size // 4) ** 2, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, classes),
    )
