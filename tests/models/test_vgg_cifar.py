"""VGG-16 for CIFAR-10: the published size and depth."""

from __future__ import annotations

import torch

from models.vgg_cifar import vgg16


def test_vgg16_has_the_published_parameters_and_layers() -> None:
    with torch.device("meta"):
        model = vgg16()
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 14_728_266
    convolutions = [layer for layer in model if isinstance(layer, torch.nn.Conv2d)]
    assert len(convolutions) == 13, "and three linear layers in the original, one here"
