"""Fully connected networks for tables, by default with eight hidden layers of 512."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch

EIGHT_OF_512: Final = (512,) * 8


def fully_connected(
    features: int, outputs: int, widths: Sequence[int] = EIGHT_OF_512
) -> torch.nn.Sequential:
    """Return features-widths-outputs with ReLU, initialised so that the signal keeps its variance.

    The published network is features-512-...-512-outputs, with 8 hidden layers (Ma and Rusu 2020).
    Weights are normal with variance 2 / inputs (He et al. 2015), biases 0. With torch's default for
    Linear the variance falls by a factor of 6 at every layer, and eight layers learn nothing.
    """
    sizes = [features, *widths, outputs]
    layers: list[torch.nn.Module] = []
    for inputs, size in pairwise(sizes):
        linear = torch.nn.Linear(inputs, size)
        torch.nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        torch.nn.init.zeros_(linear.bias)
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])
