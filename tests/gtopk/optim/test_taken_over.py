"""Training in phases: a new optimizer takes over the parameters from one that still exists."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.local_sgd import LocalSGD
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Adasum
from gtopk.runtime.world import world
from tests.gtopk.four_layers import flat, inputs, layers, take_steps


def adamw(model: torch.nn.Module) -> Any:
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    return DistributedOptimizer(plain, model.named_parameters(), Compression.gtopk(0.1))


def sgd(model: torch.nn.Module) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    return DistributedOptimizer(plain, model.named_parameters(), Compression.gtopk(0.1))


def adasum(model: torch.nn.Module) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    return DistributedOptimizer(plain, model.named_parameters(), op=Adasum)


def local_steps(model: torch.nn.Module) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    return LocalSGD(plain, inner_steps=2, named_parameters=model.named_parameters())


def train_in_phases(transport: LocalTransport, first: Any, second: Any, lives: bool) -> Any:
    """Return the parameters after a phase of each optimizer; lives: the first one still exists."""
    model = layers()
    with world.entered(transport):
        optimizer = first(model)
        take_steps(model, optimizer, transport.rank, range(4))
        # A scheduler, which wraps its `step`, keeps it alive until garbage collection.
        kept = [optimizer] if lives else []
        del optimizer
        gc.collect()
        take_steps(model, second(model), transport.rank, range(4, 10))
        kept.clear()
    return flat(model)


@pytest.mark.parametrize("second", [sgd, adamw, adasum, local_steps])
@pytest.mark.parametrize("first", [sgd, adamw, adasum])
def test_replaced_optimizer_that_is_still_alive_changes_nothing(threads, first, second) -> None:
    alone = threads(2, lambda transport: train_in_phases(transport, first, second, False))
    beside = threads(2, lambda transport: train_in_phases(transport, first, second, True))
    for each in (*alone, *beside):
        assert torch.equal(each, alone[0])


@pytest.mark.parametrize("first", [sgd, adamw])
def test_replaced_optimizer_used_again_continues_with_its_residual(threads, first) -> None:
    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        with world.entered(transport):
            optimizer = first(model)
            take_steps(model, optimizer, transport.rank, range(4))
            before = optimizer.state_dict()["gtopk"]["held"][transport.rank]
            take_steps(model, sgd(model), transport.rank, range(4, 8))
            after = optimizer.state_dict()["gtopk"]["held"][transport.rank]
            for name, parts in before.items():
                assert parts["residual"].any()
                assert torch.equal(parts["residual"], after[name]["residual"])
            take_steps(model, optimizer, transport.rank, range(8, 12))
            optimizer.zero_grad()
            model(inputs(transport.rank, 12))
            seen = flat(model)
            with optimizer.evaluating():
                center = flat(model)
        assert torch.equal(seen, center) == (first is sgd)
        return center

    one, other = threads(2, program)
    assert torch.equal(one, other)


def test_two_optimizers_of_one_model_may_take_turns(threads) -> None:
    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        with world.entered(transport):
            one, other = sgd(model), sgd(model)
            for step in range(8):
                model.zero_grad()  # not optimizer.zero_grad(), which the other would miss
                model(inputs(transport.rank, step)).square().sum().backward()
                (other if step % 2 else one).step()
        return flat(model)

    one, other = threads(2, program)
    assert torch.equal(one, other)
