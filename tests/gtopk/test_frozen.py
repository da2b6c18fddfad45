"""Layers that are frozen and thawed in mid-training: passed over meanwhile, and nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optimizer import DistributedOptimizer
from gtopk.world import world
from tests.gtopk.four_layers import distribute, flat, inputs, layers


def take_steps(model: Any, optimizer: Any, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(inputs(rank, step)).square().sum().backward()
        optimizer.step()


def held_of(optimizer: Any, name: str) -> torch.Tensor:
    return optimizer._reducer.take_state_out()[0][name]["residual"]


@pytest.mark.parametrize("one_bucket", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_frozen_layer_stays_as_it_is_and_goes_on_with_what_it_held_back(
    threads, kind, one_bucket
):
    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                kind(model.parameters(), lr=0.01, weight_decay=0.1),
                model.named_parameters(),
                Compression.gtopk(0.2),
                bucket_bytes=None if one_bucket else 1,
            )
            take_steps(model, optimizer, transport.rank, range(4))
            optimizer.zero_grad()
            model[2].requires_grad_(False)
            frozen, kept = model[2].weight.clone(), held_of(optimizer, "2.weight")
            assert kept.any()
            take_steps(model, optimizer, transport.rank, range(4, 10))
            assert torch.equal(model[2].weight, frozen)
            assert torch.equal(held_of(optimizer, "2.weight"), kept)
            model[2].requires_grad_(True)
            take_steps(model, optimizer, transport.rank, range(10, 11))
            assert not torch.equal(model[2].weight, frozen)
        return flat(model)

    one, other = threads(2, program)
    assert torch.equal(one, other)


@pytest.mark.parametrize("compression", [Compression.none, Compression.gtopk(0.3)], ids=repr)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("first", [0, 2])
def test_a_gradient_that_is_there_when_its_layer_is_frozen_is_reduced(
    threads, compression, passes, first
):
    """Torch's optimizers step what has a gradient, frozen or not."""

    def program(transport: LocalTransport) -> torch.Tensor:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, compression, backward_passes_per_step=passes)
            for step in range(4):
                optimizer.zero_grad()
                for one in range(passes):
                    loss = model(inputs(transport.rank, 10 * step + one)).square().sum()
                    loss.backward()
                    if step == first and one == 0:
                        model[1].requires_grad_(False)
                optimizer.step()
        return flat(model)

    one, other = threads(2, program)
    assert torch.equal(one, other)


def test_a_model_that_is_frozen_as_a_whole_stays_as_it_is(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            take_steps(model, optimizer, transport.rank, range(3))
            optimizer.zero_grad()
            frozen = flat(model.requires_grad_(False))
            for _ in range(3):
                optimizer.step()
            assert torch.equal(flat(model), frozen)
            take_steps(model.requires_grad_(True), optimizer, transport.rank, range(3, 5))
            assert not torch.equal(flat(model), frozen)

    threads(2, program)


def test_a_layer_may_be_frozen_while_a_rank_has_joined_where_nothing_is_held_back(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport) as here:
            optimizer = distribute(model, Compression.none)
            take_steps(model, optimizer, transport.rank, range(2))
            if transport.rank == 0:
                model[0].requires_grad_(False)
                take_steps(model, optimizer, transport.rank, range(2, 4))
            here.engine.join().wait()

    threads(2, program)


def test_what_a_checkpoint_holds_back_of_a_layer_that_is_frozen_by_then_waits(threads):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            take_steps(model, optimizer, transport.rank, range(4))
            state, kept = optimizer.state_dict(), held_of(optimizer, "1.weight")
            model = layers()
            model[1].requires_grad_(False)
            optimizer = distribute(model)
            optimizer.load_state_dict(state)
            take_steps(model, optimizer, transport.rank, range(4, 6))
            assert torch.equal(held_of(optimizer, "1.weight"), kept)
            saved = optimizer.state_dict()["gtopk"]["held"][transport.rank]
            assert torch.equal(saved["1.weight"]["residual"], kept)

    threads(2, program)


def test_what_is_held_back_of_a_name_that_no_parameter_has_is_warned_of_once(threads, caplog):
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model)
            take_steps(model, optimizer, transport.rank, range(3))
            state = optimizer.state_dict()
            model = layers()
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                [(f"other.{name}", p) for name, p in model.named_parameters()],
                Compression.gtopk(0.3),
            )
            optimizer.load_state_dict(state)
            take_steps(model, optimizer, transport.rank, range(3))
            model[0].requires_grad_(False)
            take_steps(model, optimizer, transport.rank, range(3, 5))

    with caplog.at_level(logging.WARNING, "gtopk"):
        threads(2, program)
    said = [r.getMessage() for r in caplog.records if "no parameter of that name" in r.getMessage()]
    assert sorted(text[:7] for text in said) == ["rank 0:", "rank 1:"]
    assert "'0.weight', '1.weight', '2.weight', '3.weight'" in said[0]
