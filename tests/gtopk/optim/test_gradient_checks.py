"""Reduced gradients take a GradScaler's scale into account."""

from __future__ import annotations

import pytest
import torch

from gtopk.optim import gradient_checks
from gtopk.optim.gradient_checks import loss_scale, prefetch_scale


def test_loss_scale_is_the_scale_of_an_enabled_scaler_and_1_otherwise():
    assert loss_scale(None) == 1.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0)) == 8.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0, enabled=False)) == 1.0


def test_gpu_loss_scale_is_copied_once_per_update(monkeypatch: pytest.MonkeyPatch):
    """On the host, with a scale that claims to be on a GPU."""
    copies: list[float] = []

    class CountedCopy(gradient_checks._ScaleCopy):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__(scale)
            copies.append(float(scale))

    monkeypatch.setattr(gradient_checks, "_gpu_scale", lambda scaler: scaler._scale)
    monkeypatch.setattr(gradient_checks, "_ScaleCopy", CountedCopy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for expected in (8.0, 16.0, 32.0):
        scaler.scale(parameter.sum()).backward()
        prefetch_scale(scaler)  # before backward, as in `zero_grad`
        assert [loss_scale(scaler) for _ in range(3)] == [expected] * 3
        scaler.step(optimizer)
        scaler.update()
    assert copies == [8.0, 16.0, 32.0]
