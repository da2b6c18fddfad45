"""What a GradScaler's scale is to gradients that are reduced."""

from __future__ import annotations

import torch

from gtopk.step.grad_scaler import loss_scale


def test_a_scaler_tells_its_scale_where_it_scales():
    assert loss_scale(None) == 1.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0)) == 8.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0, enabled=False)) == 1.0
