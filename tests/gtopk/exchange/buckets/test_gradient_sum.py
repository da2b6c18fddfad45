"""A dense sum through torch alone, as without CuPy; gloo replaces NCCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, gpu
from collectives.transports.device_choice import GpuFacts, GpuRoute
from collectives.transports.nccl import NcclTransport
from gtopk.exchange import exchange
from gtopk.runtime.world import world


@pytest.fixture(autouse=True)
def gpus_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def signature(host: Any, device: int | None) -> GpuFacts:
        return GpuFacts(f"GPU-{host.rank}", cupy="no cupy here", torch_nccl=22703)

    monkeypatch.setattr(gpu, "own_gpu_facts", signature)


def nccl_over(host: LocalTransport) -> NcclTransport:
    return NcclTransport(host, timeout_seconds=20, automatic=True, torch_backend="gloo")


def model() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in net.parameters():  # ranks are threads and share torch's random state
            parameter.copy_(torch.cos(torch.arange(parameter.numel())).view_as(parameter))
    return net


def train(transport: LocalTransport | NcclTransport, steps: int = 3) -> list[list[float]]:
    with world.entered(transport):
        net = model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
        )
        for step in range(steps):
            inputs = torch.sin(torch.arange(24.0).reshape(4, 6) * (1 + transport.rank + step))
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()
        return [parameter.reshape(-1).tolist() for parameter in net.parameters()]


def test_sums_through_torch_train_as_through_the_host(threads, monkeypatch) -> None:
    expected = threads(3, train)
    sums: list[int] = []

    class CountedSum(exchange.GradientSum):
        def __init__(self, *arguments: Any) -> None:
            sums.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(exchange, "GradientSum", CountedSum)

    def program(host: LocalTransport) -> tuple[Any, Any]:
        transport = nccl_over(host)
        parameters = train(transport)
        return parameters, transport.choice and transport.choice.route

    for (parameters, route), expected_parameters in zip(threads(3, program), expected, strict=True):
        assert route is GpuRoute.TORCH
        for actual, reference in zip(parameters, expected_parameters, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=2e-6, atol=1e-8)
    assert len(sums) >= 3 * 3


def test_overflowing_sum_skips_the_step_on_every_rank(threads) -> None:
    def program(host: LocalTransport) -> list[float]:
        transport = nccl_over(host)
        with world.entered(transport):
            weight = torch.nn.Parameter(torch.ones(3))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), [("w", weight)], op=hvd.Sum
            )
            weight.grad = torch.full((3,), 3e38)
            optimizer.step()
            return weight.tolist()

    assert threads(2, program) == [[1.0] * 3] * 2


def test_vectors_on_one_ranks_host_send_all_ranks_through_the_host(threads) -> None:
    def program(host: LocalTransport) -> tuple[list[float], bool]:
        transport = nccl_over(host)
        if host.rank == 1:
            transport.carries = lambda tensor: False
        parameters = train(transport)
        return parameters, transport.choice is None

    expected = threads(2, train)
    assert threads(2, program) == [(each, True) for each in expected]


def test_some_buckets_may_be_summed_on_the_host(threads) -> None:
    def program(host: LocalTransport, over_gpus: bool) -> tuple[list[Any], Any]:
        transport = nccl_over(host) if over_gpus else host
        if over_gpus:
            transport.carries = lambda tensor: tensor.numel() > 3
        with world.entered(transport):
            large, small = (torch.nn.Parameter(torch.ones(size)) for size in (8, 3))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([large, small], lr=0.5),
                [("large", large), ("small", small)],
                groups=[[large], [small]],
            )
            for step in range(3):
                for parameter in (large, small):
                    values = torch.arange(float(parameter.numel()))
                    parameter.grad = values * (step + 1 + transport.rank)
                optimizer.step()
            choice = transport.choice.route if over_gpus else None
            return [large.tolist(), small.tolist()], choice

    expected = [found for found, _ in threads(2, lambda host: program(host, False))]
    found = threads(2, lambda host: program(host, True))
    assert found == [(each, GpuRoute.TORCH) for each in expected]
