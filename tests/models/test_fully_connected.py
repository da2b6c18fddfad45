"""Fully connected networks: the published shape, and a signal that reaches the end."""

from __future__ import annotations

import torch

from models.fully_connected import fully_connected


def test_fully_connected_has_eight_hidden_layers_of_512() -> None:
    layers = [layer for layer in fully_connected(54, 2) if isinstance(layer, torch.nn.Linear)]
    sizes = [(layer.in_features, layer.out_features) for layer in layers]
    assert sizes == [(54, 512), *[(512, 512)] * 7, (512, 2)]


def test_initial_weights_keep_the_signal_size_through_eight_layers() -> None:
    torch.manual_seed(0)
    outputs = fully_connected(300, 64)(torch.randn(200, 300))
    assert 0.3 < outputs.square().mean() / 2 < 3  # the last layer has no ReLU after it


def test_fully_connected_takes_other_widths() -> None:
    model = fully_connected(13, 3, widths=(16, 8))
    assert sum(p.numel() for p in model.parameters()) == 13 * 16 + 16 + 16 * 8 + 8 + 8 * 3 + 3
    assert model(torch.zeros(5, 13)).shape == (5, 3)
