"""As in Horovod, wrapping sets gradients to zeros, which do not change a step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import gtopk.torch as hvd
from collectives.transports import LocalTransport, local_world
from gtopk.compression import Compression
from gtopk.errors import HorovodInternalError
from gtopk.optim.distributed import DistributedOptimizer
from gtopk.reduce_ops import Adasum
from gtopk.runtime.world import world
from tests.gtopk.four_layers import inputs, layers

WAYS: list[dict[str, Any]] = [
    {"compression": Compression.none},
    {"compression": Compression.fp16},
    {"compression": Compression.gtopk(0.3)},
    {"compression": Compression.gtopk(0.3, dense_under=2)},
    {"op": Adasum},
]
CLEARS: list[Callable[[Any], None]] = [
    lambda optimizer: None,
    lambda optimizer: optimizer.zero_grad(),
    lambda optimizer: optimizer.zero_grad(set_to_none=False),
]


def distribute(parameters: Any, **options: Any) -> Any:
    """Wrap an optimizer that moves parameters even with a zero gradient."""
    return DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5), **options
    )


@pytest.mark.parametrize("options", WAYS, ids=repr)
def test_wrapping_sets_zero_gradients_on_trainable_parameters(
    threads: Any, options: dict[str, Any]
) -> None:
    def program(transport: LocalTransport) -> None:
        model = layers()
        model[1].requires_grad_(False)
        with world.entered(transport):
            optimizer = distribute(model.parameters(), **options)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for layer in model:
            if layer.weight.requires_grad:
                assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))
            else:
                assert layer.weight.grad is None

    threads(2, program)


def test_gradients_on_one_rank_stay_none_before_the_first_backward() -> None:
    model = layers()
    with world.entered(local_world(1)[0]):
        distribute(model.parameters())
    assert [p.grad for p in model.parameters()] == [None] * 4


@pytest.mark.parametrize("options", WAYS, ids=repr)
@pytest.mark.parametrize("clear", CLEARS)
def test_clearing_placeholders_first_changes_no_result(
    threads: Any, options: dict[str, Any], clear: Callable[[Any], None]
) -> None:
    def program(transport: LocalTransport, clear: Callable[[Any], None]) -> list[torch.Tensor]:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model.parameters(), **options)
            clear(optimizer)
            for step in range(3):
                model(inputs(transport.rank, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.parameters()]

    expected = threads(2, partial(program, clear=CLEARS[1]))
    for got, want in zip(threads(2, partial(program, clear=clear)), expected, strict=True):
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("options", WAYS, ids=repr)
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("how", ["unused", "frozen"])
def test_parameter_that_no_rank_trains_is_not_stepped_with_zeros(
    threads: Any, options: dict[str, Any], clear: Callable[[Any], None], how: str
) -> None:
    def program(transport: LocalTransport) -> torch.Tensor:
        used, other = (torch.nn.Parameter(torch.ones(4)) for _ in "ab")
        with world.entered(transport):
            optimizer = distribute([used, other], **options)
            if how == "frozen":
                other.requires_grad_(False)
            clear(optimizer)
            used.square().sum().backward()
            optimizer.step()
        assert not torch.equal(used, torch.ones(4))
        return other.detach()

    for other in threads(2, program):
        assert torch.equal(other, torch.ones(4))


@pytest.mark.parametrize("clear", CLEARS)
def test_placeholder_counts_as_missing_if_another_rank_has_a_gradient(
    threads: Any, clear: Callable[[Any], None]
) -> None:
    def program(transport: LocalTransport, missing: Any) -> torch.Tensor:
        a, b = (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in "ab")
        with world.entered(transport):
            optimizer = distribute([a, b], named_parameters=[("a", a), ("b", b)], **missing)
            clear(optimizer)
            (a if transport.rank else a + b).square().sum().backward()
            optimizer.step()
        return b.detach()

    def expect_error(transport: LocalTransport) -> None:
        with pytest.raises(HorovodInternalError, match="'b' has none on rank 1"):
            program(transport, {"missing_gradients": "error"})

    threads(2, expect_error)
    first, second = threads(2, lambda transport: program(transport, {}))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(4, dtype=torch.float64))


def test_values_written_into_a_placeholder_count_as_gradient(threads: Any) -> None:
    def program(transport: LocalTransport) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(4))
        with world.entered(transport):
            optimizer = DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), missing_gradients="error"
            )
            parameter.grad.fill_(transport.rank)
            optimizer.step()
        return parameter.detach()

    for parameter in threads(2, program):
        assert torch.equal(parameter, torch.full((4,), -0.5))


def test_backward_adds_to_the_placeholder_in_place(threads: Any) -> None:
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model.parameters(), compression=Compression.gtopk(0.3))
            places = [p.grad.data_ptr() for p in model.parameters()]
            model(inputs(transport.rank, 0)).square().sum().backward()
            optimizer.step()
            assert [p.grad.data_ptr() for p in model.parameters()] == places
            optimizer.zero_grad()
            assert [p.grad for p in model.parameters()] == [None] * 4

    threads(2, program)


def test_sparse_gradient_replaces_the_placeholder(threads: Any) -> None:
    """SparseAdam, which accepts only sparse gradients, steps without a preceding zero_grad()."""

    def program(transport: LocalTransport) -> torch.Tensor:
        table = torch.nn.Embedding(6, 2, sparse=True)
        torch.nn.init.ones_(table.weight)
        with world.entered(transport):
            optimizer = DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
            for row in (1, 2):
                table(torch.tensor([row + transport.rank])).sum().backward()
                assert table.weight.grad.is_sparse
                optimizer.step()
                optimizer.zero_grad()
        return table.weight.detach()

    first, second = threads(2, program)
    assert torch.equal(first, second)
    assert torch.equal(first[0], torch.ones(2))
    assert (first[1:4] < 1).all()


def test_placeholders_keep_no_parameter_or_optimizer_alive(threads: Any) -> None:
    def program(transport: LocalTransport) -> None:
        model = layers()
        with world.entered(transport):
            optimizer = distribute(model.parameters())
            known = [weakref.ref(optimizer), *(weakref.ref(p) for p in model.parameters())]
            del optimizer, model
            gc.collect()
            assert [each() for each in known] == [None] * 5

    threads(2, program)
