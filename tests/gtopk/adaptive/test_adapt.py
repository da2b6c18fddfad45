"""What holds of adapt in several modes, and balanced batches on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import gtopk.torch as hvd
from gtopk.world import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks
from tests.gtopk.adaptive.sums_of_samples import data


def test_real_ranks_with_workers_see_every_sample_once(mpirun: Callable[..., Any]) -> None:
    job = mpirun(3, "adapts.py")
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("mode", ["abs", "adaptive-sgd", "hogbatch"])
def test_a_layer_that_is_thawed_after_adapt_is_an_error_of_the_next_epoch(mode: str) -> None:
    def program(here: World) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).double()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        loader = hvd.adapt(DataLoader(data(16), 4), optimizer, mode)
        for _, x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"others do, too: number 0 of group 0, \[2, 3\]"):
            next(iter(loader))

    on_ranks(1, program)


@pytest.mark.parametrize("mode", ["abs", "adaptive-sgd", "hogbatch"])
def test_a_mode_that_exchanges_no_gradients_in_backward_cannot_hide_behind_it(mode: str) -> None:
    def program(here: World) -> None:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1),
            compression=hvd.Compression.auto(hide_behind_backward=True),
        )
        with pytest.raises(ValueError, match=f"not for mode '{mode}'.* give density="):
            hvd.adapt(DataLoader(data(16), 4), optimizer, mode)

    on_ranks(1, program)


@pytest.mark.parametrize("mode", ["balanced", "abs", "adaptive-sgd", "hogbatch"])
def test_a_sampler_of_a_part_of_the_samples_is_not_taken_for_all(mode: str) -> None:
    def program(here: World) -> None:
        samples = data(64)
        inner = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner)
        for sampler, name in (
            (RandomSampler(samples, num_samples=16), "RandomSampler"),
            (SequentialSampler(range(16)), "SequentialSampler"),
        ):
            loader = DataLoader(samples, 8, sampler=sampler)
            with pytest.raises(ValueError, match=f"each of the 64 samples .* {name} draws 16;"):
                hvd.adapt(loader, optimizer, mode)

    on_ranks(1, program)
