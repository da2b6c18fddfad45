"""Optimizers with a mode's own step, and how schedulers see it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import gtopk.torch as hvd
from gtopk.runtime.world.membership import World
from tests.gtopk.adaptive.modelled_ranks import on_ranks
from tests.gtopk.adaptive.sums_of_samples import Model, data

MODES = ["abs", "adaptive-sgd", "hogbatch"]


def distributed(model: Model) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(plain, model.named_parameters())


def train(loader: Any, model: Model, optimizer: Any) -> None:
    for _, x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made_for", ["the plain optimizer", "the distributed one", "the adapted"])
def test_schedulers_give_no_warnings(mode: str, made_for: str) -> None:
    def program(here: World) -> None:
        schedulers = []

        def made(optimizer: Any, whose: str) -> Any:
            if whose == made_for:
                schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 9))
            return optimizer

        model = Model()
        plain = made(torch.optim.SGD(model.parameters(), lr=0.1), "the plain optimizer")
        optimizer = made(
            hvd.DistributedOptimizer(plain, model.named_parameters()), "the distributed one"
        )
        loader = hvd.adapt(DataLoader(data(32), 4), optimizer, mode)
        made(optimizer, "the adapted")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _, x in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()  # of "abs", which applies nothing yet
                schedulers[0].step()
                break

    on_ranks(1, program)


@pytest.mark.parametrize("mode", MODES)
def test_adapting_an_optimizer_twice_raises(mode: str) -> None:
    def program(here: World) -> None:
        model = Model()
        optimizer = distributed(model)
        train(hvd.adapt(DataLoader(data(32), 4), optimizer, mode), model, optimizer)
        for again in ("balanced", mode):
            with pytest.raises(ValueError, match=f"already adapted, in mode '{mode}'"):
                hvd.adapt(DataLoader(data(32), 4), optimizer, again)
        with pytest.raises(RuntimeError, match="batch"):
            train(DataLoader(data(32), 4), model, optimizer)

    on_ranks(2, program)


@pytest.mark.parametrize("mode", ["abs", "adaptive-sgd"])
def test_new_optimizer_continues_training_the_model(mode: str) -> None:
    def program(here: World) -> torch.Tensor:
        model = Model()
        optimizer = distributed(model)
        loader = hvd.adapt(DataLoader(data(64), 4), optimizer, mode)
        train(loader, model, optimizer)
        loader.drain()
        another = distributed(model)
        train(hvd.adapt(DataLoader(data(64), 4), another), model, another)
        sampler: Any = DistributedSampler(data(64), here.size, here.rank)
        train(DataLoader(data(64), 4, sampler=sampler), model, another)
        return model.weight.detach()

    weight, other = on_ranks(2, program)
    assert torch.equal(weight, other)


def test_error_about_adasum_names_the_op() -> None:
    def program(here: World) -> None:
        model = Model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum
        )
        with pytest.raises(ValueError, match=r"op=Adasum .* use DistributedOptimizer\(op=Average"):
            hvd.adapt(DataLoader(data(32), 4), optimizer)

    on_ranks(1, program)
