"""ResNet-20: the published size, shortcuts without parameters, and a block's computation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.resnet_cifar import Block, CifarResNet, resnet20


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (56, 853_018)])
def test_cifar_resnet_has_the_published_parameters_and_layers(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        model = CifarResNet(depth)
    assert sum(p.numel() for p in model.parameters()) == parameters
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) == depth


def test_resnet20_stages_halve_the_image_and_double_the_channels() -> None:
    model, shapes = resnet20(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: shapes.append(tuple(output.shape)))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(2, 16, 32, 32)] * 3 + [(2, 32, 16, 16)] * 3 + [(2, 64, 8, 8)] * 3


def test_resnet_block_with_zero_convolutions_is_its_shortcut() -> None:
    block = Block(2, 4, stride=2).eval()
    torch.nn.init.zeros_(block.second.weight)
    x = torch.rand(1, 2, 6, 6)
    expected = torch.cat([F.avg_pool2d(x, 1, stride=2), torch.zeros(1, 2, 3, 3)], dim=1)
    assert torch.equal(block(x), expected)


def test_invalid_resnet_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"depth must be 6n \+ 2 with n at least 1, got 18"):
        CifarResNet(18)
