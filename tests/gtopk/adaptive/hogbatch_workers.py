"""The small network and data that the tests' hogbatch workers train."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import FEATURES, network

BATCH = 16


def data(length: int = 203) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(length), x, torch.sin(x.sum(1, keepdim=True)))


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adapted(
    mode: str = "hogbatch",
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    length: int = 203,
    compression: Any = hvd.Compression.none,
    **options: Any,
) -> Any:
    model = network()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), compression)
    options = {"device_class": "slow", "sizes": {"slow": 4, "fast": 16}, **options}
    loader = hvd.adapt(DataLoader(data(length), BATCH, shuffle=True), optimizer, mode, **options)
    return loader, model, optimizer


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    device = next(model.parameters()).device
    return ((model(x.to(device)) - y.to(device)) ** 2).mean()


def train(loader: Any, model: torch.nn.Module, optimizer: Any) -> list[list[int]]:
    """Train an epoch, and return this worker's batches."""
    batches = []
    for indices, x, y in loader:
        batches.append(indices.tolist())
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return batches


def flattened(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])


def record(loader: Any, steps: list[list[int]]) -> None:
    """Append the places of each step's samples to a list."""
    update = loader._writer.update

    def recorded(apply: Callable[[], None]) -> None:
        steps.append(list(loader._batch.places))
        update(apply)

    loader._writer.update = recorded


def take_alone(model: Any, optimizer: Any, steps: list[list[int]], workers: int) -> None:
    """Take the recorded steps of two epochs in a single process."""
    rate, samples, seen = optimizer.param_groups[0]["lr"], data(), 0
    for places in steps:
        order = torch.randperm(203, generator=torch.Generator().manual_seed(seen // 203))
        _, x, y = samples[order[places]]
        seen += len(places)
        optimizer.param_groups[0]["lr"] = rate * len(places) / (BATCH * workers)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    assert seen == 2 * 203


def classes(here: World) -> str:
    return "fast" if here.rank % 2 else "slow"
