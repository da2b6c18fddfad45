"""A small run of mode "adaptive-sgd": model, optimizer and loader, on a rank that is a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk.adaptive.partitioning.cursor import by_speed

LENGTH = 203
# With real time, a thread might be too late to get any batch of a mega-batch.
EVENLY = {2: by_speed([1.0] * 2), 3: by_speed([1.0] * 3)}


def data(length: int = LENGTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(length), x, x @ torch.tensor([1.0, -2.0, 0.5]).double())


class Run:
    """A linear model, its optimizer and its adapted loader, on one rank."""

    def __init__(
        self,
        compression: Any = hvd.Compression.none,
        batch: int = 8,
        lr: float = 0.05,
        momentum: float = 0.0,
        **options: Any,
    ) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=lr, momentum=momentum),
            [("weight", self.weight)],
            compression,
            **options.pop("distributed", {}),
        )
        loader = DataLoader(data(), batch, shuffle=True)
        self.loader = hvd.adapt(loader, self.optimizer, "adaptive-sgd", **options)

    def epoch(self, until: Callable[[], bool] = lambda: False, summed: bool = False) -> list[int]:
        """Train; return the samples seen, in order."""
        seen: list[int] = []
        for indices, x, y in self.loader:
            if until():
                break
            seen += indices.tolist()
            assert len(indices) == self.loader.num_samples
            self.optimizer.zero_grad()
            losses = (x @ self.weight - y).square() / 2
            (losses.sum() if summed else losses.mean()).backward()
            self.optimizer.step()
        return seen

    def error(self) -> float:
        with self.loader.merged():
            return float((self.weight - torch.tensor([1.0, -2.0, 0.5])).detach().norm())
