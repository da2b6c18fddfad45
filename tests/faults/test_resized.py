"""Training that resumes on another number of ranks reaches the loss of training on a fixed number.

A step's batch is the same, whichever rank computes which part: only the selections differ. At
densities that the library warns about, even runs of different fixed sizes differ by more.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import gtopk
from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk.held import held

SEEDS = 5
STEPS, SAVED_AT = 200, 100
BATCH = 48  # of all ranks together
HELD_OUT = 360
DENSITY = 0.06  # of 9,610 parameters: more entries than where the library warns
RESIZED = [(4, 2), (2, 4), (4, 3), (3, 4)]


class End(NamedTuple):
    """A rank's residual at the start and at the end, and the loss on held-out images."""

    first: np.ndarray
    last: np.ndarray
    loss: float


def digits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(pixels).float() / 16 - 0.5
    return images[order], torch.from_numpy(labels).long()[order]


def network(seed: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    generator = torch.Generator().manual_seed(seed)  # threads share torch's default one
    for parameter in model.parameters():
        width = parameter.shape[-1] if parameter.dim() > 1 else 0
        parameter.data.normal_(0, (2 / width) ** 0.5 if width else 0, generator=generator)
    return model


def train(transport: LocalTransport, seed: int, folder: Path, steps: range) -> End:
    """Train for some of the steps; save after half of them, and resume from there."""
    images, labels = digits(seed)
    model, loss = network(seed), torch.nn.CrossEntropyLoss()
    with world.entered(transport):
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            Compression.gtopk(DENSITY, momentum_correction=0.9),
        )
        if steps.start:
            found = gtopk.load_latest(folder, model, optimizer, generators=False)
            assert found is not None
            assert found.step == steps.start
        first = held(optimizer)
        for step in steps:
            drawn = torch.Generator().manual_seed(STEPS * seed + step)
            batch = torch.randint(len(images) - HELD_OUT, (BATCH,), generator=drawn)
            mine = batch[transport.rank :: transport.size]
            optimizer.zero_grad()
            loss(model(images[mine]), labels[mine]).backward()
            optimizer.step()
        if steps.stop == SAVED_AT:
            gtopk.save_checkpoint(folder, model, optimizer, step=SAVED_AT)
        last = held(optimizer)
    with torch.no_grad():
        return End(first, last, float(loss(model(images[-HELD_OUT:]), labels[-HELD_OUT:])))


def summed(parts: list[np.ndarray]) -> np.ndarray:
    return np.sum(parts, axis=0, dtype=np.float64)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, in_world: Any) -> dict[tuple[int, int], list]:
    """Return the losses of all seeds, by the number of ranks in the first and the second half."""
    found: dict[tuple[int, int], list[float]] = {}
    for seed in range(SEEDS):
        for before in (2, 3, 4):
            folder = tmp_path_factory.mktemp(f"seed-{seed}")
            run = partial(train, seed=seed, folder=folder)
            halves = in_world("local", before, partial(run, steps=range(SAVED_AT)))
            held_back = summed([rank.last for rank in halves])
            for after in [before, *(then for of, then in RESIZED if of == before)]:
                ends = in_world("local", after, partial(run, steps=range(SAVED_AT, STEPS)))
                off = np.abs(summed([rank.first for rank in ends]) - held_back).max()
                assert off <= 1e-6 * np.abs(held_back).max()
                assert len({rank.loss for rank in ends}) == 1
                found.setdefault((before, after), []).append(ends[0].loss)
    for (before, after), all_seeds in found.items():
        mean, sigma = statistics.mean(all_seeds), statistics.stdev(all_seeds)
        print(f"{before} ranks, then {after}: loss {mean:.4f}, sigma {sigma:.4f}", flush=True)
    return found


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), RESIZED)
def test_runs_resumed_on_other_rank_counts_reach_the_same_loss(losses, before, after):
    """The sigma is that of the five runs that keep the number of ranks, before or after."""
    resized = statistics.mean(losses[before, after])
    for kept in (before, after):
        fixed = losses[kept, kept]
        assert abs(resized - statistics.mean(fixed)) <= statistics.stdev(fixed)
