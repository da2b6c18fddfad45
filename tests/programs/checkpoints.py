"""A training run with dropout on real ranks, saved in the middle of an epoch and resumed.

Argument: a folder. After loading, random numbers must be those of an uninterrupted run.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import light_torch  # noqa: F401

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk
import gtopk.torch as hvd

STEPS, SAVED_AT = 9, 4


class Run:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        )
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.01),
            self.model.named_parameters(),
            hvd.Compression.gtopk(density=0.1),
        )
        x = torch.linspace(-1, 1, 180).reshape(60, 3)
        dataset = TensorDataset(x, x.sum(1, keepdim=True))
        self.loader = hvd.adapt(DataLoader(dataset, 4, shuffle=True), self.optimizer)

    def train(self, folder: Path | None = None, done: int = 0) -> list[float]:
        """Return the loss of every step, and the random numbers that follow."""
        losses: list[float] = []
        while done < STEPS:
            for x, y in self.loader:
                noise = random.random() + np.random.rand()
                self.optimizer.zero_grad()
                loss = (self.model(x) - y * noise).square().mean()
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
                done += 1
                if folder and done == SAVED_AT:
                    gtopk.save_checkpoint(
                        folder, self.model, self.optimizer, self.loader, done, asynchronous=True
                    )
                if done == STEPS:
                    break
        return [*losses, random.random(), np.random.rand(), torch.rand(()).item()]


def flat(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def main() -> None:
    folder = Path(sys.argv[1])
    hvd.init()
    whole = Run(seed=100 + hvd.rank())
    hvd.broadcast_parameters(whole.model.state_dict(), 0)
    losses = whole.train(folder)
    resumed = Run(seed=200 + hvd.rank())
    found = gtopk.load_latest(folder, resumed.model, resumed.optimizer, resumed.loader)
    assert found is not None
    assert (found.step, found.ranks) == (SAVED_AT, hvd.size())
    assert resumed.train(done=found.step) == losses[SAVED_AT:]
    assert flat(resumed.model) == flat(whole.model)
    print(f"rank {hvd.rank()} went on from step {found.step}\n", end="", flush=True)


if __name__ == "__main__":
    main()
