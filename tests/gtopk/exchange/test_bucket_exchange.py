"""BucketExchange: the methods that any thread may call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport, Transport
from collectives.transports.local import local_world, run_ranks
from gtopk.compression import Compression, FP16Compressor
from gtopk.exchange import exchange
from gtopk.exchange.bucket_exchange import gradient_norm, open_bucket_exchange
from gtopk.exchange.exchange import Progress


def test_finite_checks_run_on_the_stream_of_the_captured_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, float("nan"), 2.0])
    bucket_exchange = open_bucket_exchange(
        "lane", [parameter], ["p"], Compression.gtopk(density=0.5), Progress()
    )
    bucket_exchange.capture_gradients(1.0, 1.0)
    entered: list[bool] = []

    @contextmanager
    def on_stream() -> Iterator[None]:
        parameter.grad[1] = 0.0  # the gradient exists by then
        entered.append(True)
        yield

    monkeypatch.setattr(bucket_exchange.bucket, "on_stream", on_stream)
    assert bucket_exchange.all_finite()
    parameter.grad[1] = float("nan")
    assert bucket_exchange.not_finite() == []
    assert entered == [True, True]


@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_builtin_cast_equals_a_compressor_subclass(
    threads: Callable[..., Any], compressor: type[FP16Compressor], weight: float
) -> None:
    """The first casts into memory that it keeps; the subclass calls a function for each tensor."""

    class Subclass(compressor):  # type: ignore[misc, valid-type]
        pass

    def program(transport: LocalTransport) -> list[torch.Tensor]:
        parameter = torch.nn.Parameter(torch.zeros(40))
        gradients = []
        for kind in (compressor, Subclass):
            exchange = open_bucket_exchange("lane", [parameter], ["p"], kind, Progress())
            random = torch.Generator().manual_seed(transport.rank)
            for _ in range(2):
                parameter.grad = torch.randn(40, generator=random)
                exchange.capture_gradients(weight, 2.0)
                exchange.exchange(exchange.bucket, transport)
                exchange.exchange.apply(exchange.bucket)
                gradients.append(parameter.grad.clone())
        return gradients

    for first, second, subclass_first, subclass_second in threads(3, program):
        assert torch.equal(first, subclass_first)
        assert torch.equal(second, subclass_second)
        assert not torch.equal(first, second)
        assert first.all()


def test_nodes_are_found_once_during_density_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    find_nodes = exchange.find_nodes

    def find(transport: Transport, node_size: int | None) -> list[list[int]]:
        calls.append(transport.rank)
        return find_nodes(transport, node_size)

    monkeypatch.setattr(exchange, "find_nodes", find)

    def program(transport: Transport) -> list[int]:
        progress, parameter = Progress(), torch.nn.Parameter(torch.zeros(100))
        compression = Compression.hierarchical(density=0.05, warmup_steps=3)
        bucket_exchange = open_bucket_exchange("lane", [parameter], ["p"], compression, progress)
        sizes = []
        for _ in range(4):
            parameter.grad = torch.arange(100.0)
            bucket_exchange.capture_gradients(0.5, 1.0)
            sizes.append(bucket_exchange.reduce(transport).selected)
            bucket_exchange.apply(())
            progress.steps += 1
        return sizes

    first, *others = run_ranks(local_world(2), program)
    assert all(each == first for each in others)
    assert len(set(first)) == len(first)  # another k in each step
    assert sorted(calls) == [0, 1]


@pytest.mark.parametrize(
    ("squares", "norm"), [([], None), ([0.0], None), ([None, 3.0, 0.0, 6.0], 6.0)]
)
def test_gradient_norm_is_none_where_nothing_was_sampled(
    squares: list[float | None], norm: float | None
) -> None:
    exchanges = [
        SimpleNamespace(adam=None if each is None else SimpleNamespace(mean_square=each))
        for each in squares
    ]
    assert gradient_norm(exchanges, clip_factor=0.5) == norm
