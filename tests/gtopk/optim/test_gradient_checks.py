"""Reduced gradients take a GradScaler's scale into account."""

from __future__ import annotations

import pytest
import torch

from gtopk.optim import gradient_checks
from gtopk.optim.gradient_checks import loss_scale, prefetch_scale


def test_a_scaler_tells_its_scale_where_it_scales():
    assert loss_scale(None) == 1.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0)) == 8.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0, enabled=False)) == 1.0


def test_a_scale_on_a_gpu_is_read_once_for_each_update(monkeypatch: pytest.MonkeyPatch):
    """On the host, with a scale that claims to be on a GPU."""
    read: list[float] = []

    class Counted(gradient_checks._ScaleCopy):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__(scale)
            read.append(float(scale))

    monkeypatch.setattr(gradient_checks, "_gpu_scale", lambda scaler: scaler._scale)
    monkeypatch.setattr(gradient_checks, "_ScaleCopy", Counted)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for expected in (8.0, 16.0, 32.0):
        scaler.scale(parameter.sum()).backward()
        prefetch_scale(scaler)  # before backward, as in `zero_grad`
        assert [loss_scale(scaler) for _ in range(3)] == [expected] * 3
        scaler.step(optimizer)
        scaler.update()
    assert read == [8.0, 16.0, 32.0]
