"""AlexNet: the published size, and the smallest images."""

from __future__ import annotations

import torch

from models.alexnet import alexnet


def test_alexnet_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = alexnet()
        for size in (224, 63):
            assert model(torch.zeros(2, 3, size, size)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == 61_100_840
    linear = [
        p for layer in model if isinstance(layer, torch.nn.Linear) for p in layer.parameters()
    ]
    assert round(100 * sum(p.numel() for p in linear) / 61_100_840) == 96
