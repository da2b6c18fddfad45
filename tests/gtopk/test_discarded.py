"""A gradient that is synchronized and discarded, as in a GAN, has no effect."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.runtime.world import world
from tests.gtopk.four_layers import distribute, inputs, layers

WITH_RESIDUAL = [
    Compression.topk(0.3),
    Compression.gtopk(0.3),
    Compression.gtopk(0.3, values="int8"),
    Compression.gtopk(0.3, momentum_correction=0.9, factor_masking=True),
    Compression.gtopk(0.3, adam_correction=(0.9, 0.999)),
    Compression.oktopk(0.3),
    Compression.hierarchical(0.3, inside="dense", node_size=2),
    Compression.gtopk(0.3, warmup_steps=10),
    Compression.shards(2, 3),
    Compression.shards(1, 2, momentum_correction=0.9),
]


def own_state(optimizer: Any) -> dict[str, Any]:
    """Return the exchange's part of the optimizer's state."""
    state = optimizer.state_dict().get("gtopk", {"held": {}})
    return {"steps": optimizer._reducer.steps, "held": state["held"]}


def assert_same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def backward(model: torch.nn.Module, rank: int, number: int) -> None:
    model(inputs(rank, number)).square().sum().backward()


def by_the_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def in_place(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_the_model(model: torch.nn.Module, optimizer: Any) -> None:
    model.zero_grad()


DISCARDS = [by_the_optimizer, in_place, by_the_model]


@pytest.mark.parametrize("compression", WITH_RESIDUAL, ids=repr)
@pytest.mark.parametrize("discard", DISCARDS)
def test_discarded_gradient_changes_no_later_step(
    threads: Any, compression: Any, discard: Callable[..., None]
) -> None:
    def train(transport: LocalTransport, discards: bool) -> Any:
        model = layers()
        with world.entered(transport), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = distribute(model, compression)
            for step in range(4):
                if discards and step:
                    optimizer.zero_grad()
                    backward(model, transport.rank, 100 + step)
                    optimizer.synchronize()
                    discard(model, optimizer)
                else:
                    optimizer.zero_grad()
                backward(model, transport.rank, step)
                optimizer.step()
            return own_state(optimizer), model.state_dict()

    plain = threads(4, lambda transport: train(transport, discards=False))
    with_discards = threads(4, lambda transport: train(transport, discards=True))
    for (state, parameters), (expected_state, expected_parameters) in zip(
        with_discards, plain, strict=True
    ):
        assert_same(dict(parameters), dict(expected_parameters))
        assert_same(state, expected_state)


@pytest.mark.parametrize("compression", WITH_RESIDUAL, ids=repr)
def test_checkpoint_before_the_step_excludes_the_update(threads: Any, compression: Any) -> None:
    """The parameters do not have it yet, so a run resumed from there must send it again."""

    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, compression)
            backward(model, transport.rank, 0)
            optimizer.step()
            optimizer.zero_grad()
            before = own_state(optimizer)
            backward(model, transport.rank, 1)
            optimizer.synchronize()
            assert_same(own_state(optimizer), before)
            with optimizer.skip_synchronize():
                optimizer.step()
            assert own_state(optimizer)["steps"] == 2
            optimizer.zero_grad()
            assert own_state(optimizer)["steps"] == 2

    threads(4, program)


def test_discard_restores_residuals_drained_by_dense_steps(threads: Any) -> None:
    """A dense exchange sends the residuals of sparse steps in a limited number of steps."""

    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            sparse = distribute(model, Compression.gtopk(0.3))
            backward(model, transport.rank, 0)
            sparse.step()
            model = layers()
            dense = distribute(model, Compression.none)
            dense.load_state_dict(sparse.state_dict())
            left = own_state(dense)["held"][transport.rank]
            for number in range(1, 40):
                backward(model, transport.rank, number)
                dense.synchronize()
                dense.zero_grad()
                assert_same(own_state(dense)["held"][transport.rank], left)
            while any(parts["residual"].any() for parts in left.values()):
                backward(model, transport.rank, 1)
                dense.synchronize()
                dense.zero_grad()  # also in the step that would be the last
                backward(model, transport.rank, 1)
                dense.step()
                dense.zero_grad()
                left = own_state(dense)["held"].get(transport.rank, {})

    threads(2, program)


def test_discard_restores_residuals_sent_with_a_sparse_gradient(threads: Any) -> None:
    def program(transport: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.nn.Embedding(6, 2, sparse=False)
        torch.nn.init.ones_(table.weight)
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=1.0),
                table.named_parameters(),
                Compression.topk(0.2),
            )
            table(torch.arange(6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            left = own_state(optimizer)["held"][transport.rank]["weight"]["residual"].clone()
            table.sparse = True
            for _ in range(2):
                table(torch.tensor([0])).sum().backward()
                optimizer.synchronize()
                saved = own_state(optimizer)["held"][transport.rank]["weight"]["residual"]
                assert_same(saved.to(left.dtype), left)
                optimizer.zero_grad()
            before = table.weight.detach().clone()
            (table(torch.tensor([0])) * 0).sum().backward()
            optimizer.step()
            return left, before - table.weight.detach()

    ranks = threads(2, program)
    total = sum(left for left, _ in ranks)
    assert total.any()
    for _, moved in ranks:
        assert_same(moved, total.to(moved.dtype))


def test_update_applied_by_another_optimizer_stays_sent(threads: Any) -> None:
    """For scripts that only synchronize gradients, and step with another optimizer."""

    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.3))
            other = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(3):
                backward(model, transport.rank, number)
                optimizer.synchronize()
                other.step()
                if number:
                    assert own_state(optimizer)["steps"] == number + 1
                optimizer.zero_grad()
                assert own_state(optimizer)["steps"] == number + 1

    threads(2, program)


def test_repeated_synchronize_counts_each_exchange(threads: Any) -> None:
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.3))
            backward(model, transport.rank, 0)
            optimizer.synchronize()
            optimizer.synchronize()
            assert own_state(optimizer)["steps"] == 1
            with optimizer.skip_synchronize():
                optimizer.step()
            assert own_state(optimizer)["steps"] == 2

    threads(2, program)


@pytest.mark.parametrize("compression", [Compression.shards(2, 3), Compression.gtopk(0.3)])
def test_discarded_update_stays_sent_once_a_rank_has_joined(threads: Any, compression: Any) -> None:
    """The joined rank has sent its residual for good, and does not learn of the discard."""

    def program(transport: LocalTransport) -> int:
        model = layers()
        with world.entered(transport) as here:
            optimizer = distribute(model, compression)
            for step in range(4 if transport.rank else 2):
                backward(model, transport.rank, step)
                if step == 2:
                    optimizer.synchronize()
                    optimizer.zero_grad()
                    backward(model, transport.rank, step)
                optimizer.step()
                optimizer.zero_grad()
            here.engine.join().wait()
            return optimizer._reducer.steps

    assert threads(2, program) == [5, 5]
