"""A small training on ranks as threads, with computing speeds set by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world, run_ranks
from gtopk.runtime.world import world
from gtopk.runtime.world.membership import World

FEATURES = 5


class Clock:
    """A clock that the test advances."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Modelled:
    """A timer that models a rank's samples per second."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.samples = 0

    def start(self, samples: int) -> None:
        self.samples = samples

    def elapsed_seconds(self) -> float | None:
        return self.samples / self.speed


class Prompt:
    """A wire on which every rank waits immediately, so that rounds are the same in every run."""

    class Completed:
        done = True

        def __init__(self, operation: Any) -> None:
            self.wait = operation.wait
            operation.wait()

    def __init__(self, wire: Any) -> None:
        self._wire = wire
        self.gather_drains = wire.gather_drains

    def ready(self, *arguments: Any) -> Any:
        return self.Completed(self._wire.ready(*arguments))

    def reduce(self, *arguments: Any) -> Any:
        return self.Completed(self._wire.reduce(*arguments))


def on_ranks(size: int, program: Callable[[World], Any]) -> list[Any]:
    def rank(transport: LocalTransport) -> Any:
        with world.entered(transport) as here:
            return program(here)

    return run_ranks(local_world(size, timeout_seconds=30), rank)


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.double().parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return model


def sgd(model: torch.nn.Module, compression: Any = hvd.Compression.none) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    each_alone = {"bucket_bytes": 1}  # so that exchanges begin during backward
    return hvd.DistributedOptimizer(inner, model.named_parameters(), compression, **each_alone)


def some_optimizer() -> Any:
    return sgd(network())


def step_on(
    model: torch.nn.Module, optimizer: Any, batch: Any, loss: Callable[..., torch.Tensor]
) -> None:
    x, y = batch
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()


def mean_loss(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((prediction - y) ** 2).mean()
