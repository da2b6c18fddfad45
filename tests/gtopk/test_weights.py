"""What a rank's gradients are multiplied with before anything else."""

from __future__ import annotations

import math

import pytest
import torch

from gtopk.weights import local_clip, loss_scale


def parameters_of(*gradients: torch.Tensor | None) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def test_a_gradient_longer_than_its_share_is_shortened_to_it():
    parameters = parameters_of(torch.tensor([3.0, 0.0]), None, torch.tensor([0.0, 4.0]))
    assert local_clip(parameters, 5.0, ranks=1, scale=1.0) == 1.0
    assert local_clip(parameters, 5.0, ranks=4, scale=1.0) == 0.5
    assert local_clip(parameters, 5.0, ranks=4, scale=2.0) == 1.0
    assert local_clip(parameters, None, ranks=4, scale=1.0) == 1.0


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_what_has_no_length_is_left_alone(value):
    assert local_clip(parameters_of(torch.full((2,), value)), 0.1, 2, 1.0) == 1.0
    assert local_clip(parameters_of(None), 0.1, 2, 1.0) == 1.0


def test_a_scaler_tells_its_scale_where_it_scales():
    assert loss_scale(None) == 1.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0)) == 8.0
    assert loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0, enabled=False)) == 1.0
