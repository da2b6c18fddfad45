"""Four layers, each a bucket of its own: what is exchanged while backward goes on."""

from __future__ import annotations

from typing import Any

import torch

from gtopk.compression import Compression
from gtopk.optimizer import DistributedOptimizer

EACH_ALONE = {"bucket_bytes": 1}


def layers() -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(4))).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
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
