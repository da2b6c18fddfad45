"""A model in mode "abs" with gradients equal to the samples, so that tests can sum updates."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import Prompt

GTOPK = hvd.Compression.gtopk(density=0.4)


def data(length: int) -> TensorDataset:
    x = torch.randn(length, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(torch.arange(length), x)


class Model(torch.nn.Module):
    """Its gradient at a sample is the sample, so sums of gradients are sums of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def adapted(
    here: World, length: int, compression: Any = hvd.Compression.none, **options: Any
) -> Any:
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression
    )
    loader = hvd.adapt(
        DataLoader(data(length), 8, shuffle=True), optimizer, "abs", micro_batch=4, **options
    )
    return loader, model, optimizer


def prompt(parts: Any) -> Any:
    parts[0].rounds._wire = Prompt(parts[0].rounds._wire)
    return parts


def run(
    loader: Any,
    model: Model,
    optimizer: Any,
    until: float = float("inf"),
    states: list[Any] | None = None,
) -> list[int]:
    """Return the applied samples of an epoch, or of its rounds up to one that drains everything.

    states: receives the loader's state then, before the epoch is aborted.
    """
    seen: list[int] = []
    for indices, x in loader:
        seen += indices.tolist() if loader.num_samples else []
        model(x).mean().backward()
        optimizer.step()
        if loader.round >= until:
            loader.drain()
            if states is not None:
                states.append(loader.state_dict())
            break
    return seen


def stop_apart(here: World, loader: Any, model: Model, optimizer: Any) -> None:
    """Stop on two ranks in the same round, which only rank 0 has ended."""
    loader.rounds._wire = loader._wire  # from here on ranks need not keep together
    for number, (_, x) in enumerate(loader):
        model(x).mean().backward()
        optimizer.step()
        if here.rank == 1 or number == 1:
            break
        loader.rounds._ready.wait()
    assert (loader.rounds._reducing is None) == (here.rank == 1)
