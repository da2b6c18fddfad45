"""Mode "balanced" measures gradient noise correctly, on ranks as threads."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from collectives.kernels.reference import squared_norm
from gtopk.adaptive.noise_scale import NoiseAverage, estimate
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import (
    Modelled,
    data,
    mean_loss,
    network,
    on_ranks,
    sgd,
    step_on,
)


def test_noise_is_measured_and_equal_on_all_ranks() -> None:
    def program(here: World) -> Any:
        model = network()
        optimizer = sgd(model, hvd.Compression.gtopk(density=0.1))
        loader = hvd.adapt(
            DataLoader(data(96), 8), optimizer, noise_every=2, timer=Modelled(1.0 + here.rank)
        )
        for batch in loader:
            step_on(model, optimizer, batch, mean_loss)
        return loader.noise

    noises = on_ranks(3, program)
    assert noises[0] is not None
    assert noises[0].variance > 0
    assert noises == [noises[0]] * 3


def test_noise_is_independent_of_loss_scale() -> None:
    def program(here: World) -> None:
        noises = []
        for scale in (1.0, 1024.0):
            model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=scale)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                scaler=scaler,
            )
            loader = hvd.adapt(DataLoader(data(32), 8), optimizer, noise_every=1)
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(mean_loss(model(x), y)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update(0.5 * scaler.get_scale())
            noises.append(loader.noise)
        assert noises[0] == noises[1]

    on_ranks(2, program)


def test_square_of_mean_gradient_is_summed_in_kernel_order() -> None:
    """AdaScale's rates depend on it; the sums of torch and NumPy depend on the processor."""
    x = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def program(here: World) -> Any:
        weight = torch.nn.Parameter(torch.zeros(40_000, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
        loader = hvd.adapt(DataLoader(TensorDataset(x), 1), optimizer, noise_every=1)
        for (row,) in loader:
            (row @ weight).sum().backward()
            optimizer.step()
        return loader.noise

    average = NoiseAverage()
    squares = sum(float(row @ row) for row in x) / 2
    average.add(estimate(squares, squared_norm(x.mean(0).numpy()), [1, 1]))
    assert on_ranks(2, program) == [average.value] * 2
