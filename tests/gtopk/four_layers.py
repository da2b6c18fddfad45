"""Train four layers, each in its own bucket, with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk.held import held

EACH_ALONE = {"bucket_bytes": 1}


def layers() -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(4))).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return model


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def distribute(model: torch.nn.Module, compression: Any = None, **options: Any) -> Any:
    return DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression or Compression.gtopk(0.3),
        **{**EACH_ALONE, **options},
    )


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def take_steps(model: Any, optimizer: Any, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(inputs(rank, step)).square().sum().backward()
        optimizer.step()


def train(
    transport: LocalTransport, compression: Any, disturb: Any = None, **options: Any
) -> tuple[torch.Tensor, np.ndarray]:
    """Return parameters and residual after some steps; `disturb` is called after each backward."""
    model = layers()
    with world.entered(transport):
        optimizer = distribute(model, compression, **options)
        for step in range(5):
            optimizer.zero_grad()
            model(inputs(transport.rank, step)).square().sum().backward()
            if disturb is not None:
                disturb(model, optimizer, step)
            optimizer.step()
        return flat(model), held(optimizer)
