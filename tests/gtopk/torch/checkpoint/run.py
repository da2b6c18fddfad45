"""A run in which every part has a state to save and load."""

from __future__ import annotations

from itertools import chain, islice

import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk import load_latest, save_checkpoint
from tests.gtopk.adaptive.modelled_ranks import Modelled
from tests.gtopk.held import held


class Run:
    """A run in which every part has a state; running means differ between ranks."""

    def __init__(self, adam=False, compression=None, momentum=0.9, **adapted):
        x = torch.linspace(-1, 1, 120).reshape(60, 2)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            parameter.data.normal_(std=0.3, generator=generator)
        inner = (
            torch.optim.Adam(self.model.parameters(), lr=0.01)
            if adam
            else torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=momentum)
        )
        self.optimizer = hvd.DistributedOptimizer(
            inner,
            self.model.named_parameters(),
            compression or hvd.Compression.gtopk(density=0.2),
            bucket_bytes=100,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.7)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), 4, shuffle=True)
        timer = Modelled(1.0 + hvd.rank())
        options = adapted or {"interval": 3, "min_batch": 2, "timer": timer}
        self.loader = hvd.adapt(data, self.optimizer, seed=5, **options)
        self.batches = chain.from_iterable(iter(self.loader) for _ in range(100))

    def steps(self, count):
        for x, y in islice(self.batches, count):
            self.optimizer.zero_grad()
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, folder, step=0, **options):
        return save_checkpoint(
            folder,
            self.model,
            self.optimizer,
            self.loader,
            step,
            scheduler=self.scheduler,
            note={"seen": step},
            **options,
        )

    def load(self, folder, **options):
        return load_latest(
            folder,
            self.model,
            self.optimizer,
            self.loader,
            scheduler=self.scheduler,
            generators=False,  # ranks as threads share them
            **options,
        )

    def everything(self):
        """Return everything that a resumed run must reproduce, as exact text."""
        self.loader.drain()
        tensors = {**self.model.state_dict(), "held": torch.from_numpy(held(self.optimizer))}
        states = self.optimizer.state_dict()["state"], self.scheduler.state_dict()
        bits = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        return bits, repr(states), repr(self.loader.state_dict())
