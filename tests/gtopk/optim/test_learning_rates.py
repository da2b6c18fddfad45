"""The ramp: a learning rate rises linearly to its former value."""

from __future__ import annotations

import re

import pytest
import torch

import gtopk


def rates(steps: int, **options: object) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = gtopk.ramp(optimizer, 10, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_ramp_rises_to_the_learning_rate_and_stays():
    assert rates(9, start=0.5, until=0.4) == pytest.approx([1, 1.25, 1.5, 1.75, 2, 2, 2, 2, 2])


def test_ramp_multiplies_another_schedule():
    plain_ramp = rates(8, start=0.25)
    assert rates(8, start=0.25, schedule=lambda step: 0.5**step) == pytest.approx(
        [rate * 0.5**step for step, rate in enumerate(plain_ramp)]
    )


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"start": 0.0}, ValueError, "start must lie in (0, 1], got 0.0"),
        ({"until": 1.5}, ValueError, "until must lie in (0, 1], got 1.5"),
        ({"schedule": 0.5}, TypeError, "schedule must be a function that returns a factor"),
        ({"start": "half"}, TypeError, "start must be a number, got 'half'"),
    ],
)
def test_invalid_ramp_option_raises(options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        rates(1, **options)


def test_ramp_without_steps_or_optimizer_raises():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        gtopk.ramp(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 0)
    with pytest.raises(
        TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, .* got Linear"
    ):
        gtopk.ramp(torch.nn.Linear(1, 1), 10)


def test_second_ramp_uses_a_new_rate_only_if_initial_lr_is_set():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    gtopk.ramp(optimizer, 10)
    (group,) = optimizer.param_groups
    group["lr"] = 0.5
    gtopk.ramp(optimizer, 10)
    assert group["lr"] == 1.0, "torch's schedulers begin at the first rate"
    group["lr"] = group["initial_lr"] = 0.5
    gtopk.ramp(optimizer, 10)
    assert group["lr"] == 0.25
