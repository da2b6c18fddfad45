"""The multilayer perceptron of the digits example."""

from __future__ import annotations

import torch


def mlp(features: int = 64, hidden: int = 256, classes: int = 10) -> torch.nn.Sequential:
    """Return features-hidden-hidden-classes with ReLU: 85,002 parameters at the defaults."""
    return torch.nn.Sequential(
        torch.nn.Linear(features, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, classes),
    )
