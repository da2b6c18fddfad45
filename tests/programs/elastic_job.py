"""Elastic training of two epochs, in which a rank is killed once if the arguments say so.

Arguments: epoch, batch and rank of the kill, and a file that marks that it has happened; or
nothing. Prints, for every rank, the samples of each epoch and a digest of the parameters.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd

EPOCHS, SAMPLES, BATCH, COMMIT_EVERY = 2, 36, 2, 2


class Trained(NamedTuple):
    """A rank's result: the batches of all ranks, by epoch, and its parameters."""

    batches: list[list[list[int]]]
    digest: str
    resets: int

    def samples(self) -> list[list[int]]:
        """Return the samples that were processed, in order, by epoch."""
        return [sorted(chain.from_iterable(epoch)) for epoch in self.batches]

    def __str__(self) -> str:
        return f"samples {self.samples()}, digest {self.digest}, {self.resets} resets"


def make_model(seed: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


def train(before_batch: Callable[[int, int], None]) -> Trained:
    """Train on the current ranks; before_batch(epoch, batch) may kill this one."""
    dataset = TensorDataset(torch.arange(SAMPLES), torch.linspace(-1, 1, SAMPLES).reshape(-1, 1))
    model = make_model(seed=hvd.rank())  # ranks start apart; `sync` makes them equal
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        hvd.Compression.gtopk(density=0.3),
    )
    sampler = hvd.elastic.ElasticSampler(dataset, seed=5)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)

    @hvd.elastic.run
    def attempt(state: hvd.elastic.TorchState) -> None:
        for epoch in range(state.epoch, EPOCHS):
            state.epoch, done = epoch, state.batches[epoch]
            for index, (numbers, inputs) in enumerate(loader):
                before_batch(epoch, len(done))
                optimizer.zero_grad()
                (model(inputs) - inputs.sin()).square().mean().backward()
                optimizer.step()
                sampler.record_batch(index, BATCH)
                done.append(hvd.allgather(numbers).tolist())
                if len(done) % COMMIT_EVERY == 0:
                    state.commit()
            sampler.set_epoch(epoch + 1)

    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, epoch=0, batches=[[] for _ in range(EPOCHS)]
    )
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    attempt(state)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return Trained(state.batches, digest.hexdigest(), len(resets))


def kill_once(epoch: int, batch: int) -> None:
    """Kill this rank if the arguments say so and it has not happened before."""
    if sys.argv[1:4] == [str(epoch), str(batch), str(hvd.rank())]:
        happened = Path(sys.argv[4])
        if not happened.exists():
            happened.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    hvd.init()
    print(f"rank {hvd.rank()} of {hvd.size()}: {train(kill_once)}\n", end="", flush=True)
