"""ResNet-50: the published size and depth, and where images are halved."""

from __future__ import annotations

import torch

from models.resnet_imagenet import Bottleneck, resnet50


def test_resnet50_has_the_published_parameters_layers_and_stages() -> None:
    shapes = []
    with torch.device("meta"):
        model = resnet50()
        for block in model:
            if isinstance(block, Bottleneck):
                block.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape))
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) == 50 + 4, "and a convolution in each stage's first shortcut"
    stages = [(256, 56)] * 3 + [(512, 28)] * 4 + [(1024, 14)] * 6 + [(2048, 7)] * 3
    assert [tuple(shape) for shape in shapes] == [(2, c, side, side) for c, side in stages]


def test_narrow_resnet50_has_finite_gradients() -> None:
    torch.manual_seed(0)
    model = resnet50(classes=5, width=4)
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
