"""Gradient noise from unequal batches, and AdaScale's rates from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import gtopk.torch as hvd
from gtopk.adaptive.current_batch import adascale
from gtopk.adaptive.noise_scale import Noise, estimate
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import data, mean_loss, network, on_ranks, sgd, step_on

SIZES = [2, 7, 15]


def sum_loss(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((prediction - y) ** 2).sum()


def test_adascale_equals_the_published_gain() -> None:
    noise = Noise(variance=640.0, square=6.0)
    assert adascale(4, noise, 64) == (10.0 + 6.0) / (2.5 + 6.0)
    assert adascale(0.5, noise, 64) == (10.0 + 6.0) / (20.0 + 6.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_accounts_for_unequal_batches_and_sets_adascale_rate(reduction: str) -> None:
    """The first step probes; the second has half the samples and the rate for the found noise."""

    def program(here: World) -> Any:
        model = network()
        optimizer = sgd(model)
        loader = hvd.adapt(
            DataLoader(data(36), 8),
            optimizer,
            max_batch=SIZES[here.rank],
            noise_every=2,
            interval=100,
            lr_scaling="adascale",
            loss_reduction=reduction,
        )
        rates: list[float] = []
        optimizer.register_step_pre_hook(
            lambda optimizer, *step: rates.append(optimizer.param_groups[0]["lr"])
        )
        gradients, sizes = [], []
        for batch in loader:
            sizes.append(loader.sizes)
            alone = network()
            mean_loss(alone(batch[0]), batch[1]).backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in alone.parameters()]).numpy())
            step_on(model, optimizer, batch, mean_loss if reduction == "mean" else sum_loss)
        return gradients[0], sizes, loader.noise, rates

    gradients, sizes, noises, rates = zip(*on_ranks(3, program), strict=True)
    assert sizes[0][0] == SIZES
    assert sum(sizes[0][1]) == 12
    weights = np.array(SIZES) / 24
    together = weights @ np.stack(gradients)
    squares = float(weights @ [g @ g for g in gradients])
    variance, square = estimate(squares, float(together @ together), SIZES)
    assert min(variance / 24, square) > 1e-3
    gain = (variance / 24 + square) / (variance / 12 + square)
    for noise, own in zip(noises, rates, strict=True):
        assert noise == pytest.approx((variance, square), rel=1e-9)
        assert own == pytest.approx([0.1, 0.1 * gain], rel=1e-9)
