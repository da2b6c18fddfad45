"""BucketExchange: the methods that any thread may call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport, Transport
from collectives.transports.local import local_world, run_ranks
from gtopk.compression import Compression, FP16Compressor
from gtopk.exchange import exchange
from gtopk.exchange.bucket_exchange import open_bucket_exchange
from gtopk.exchange.exchange import Progress


def test_whoever_looks_at_gradients_does_so_on_the_stream_they_were_taken_on(
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
def test_a_cast_sends_what_a_compressor_with_such_functions_sends(
    threads: Callable[..., Any], compressor: type[FP16Compressor], weight: float
) -> None:
    """One casts into memory that it keeps; the other calls a function for each tensor."""

    class Own(compressor):  # type: ignore[misc, valid-type]
        pass

    def program(transport: LocalTransport) -> list[torch.Tensor]:
        parameter = torch.nn.Parameter(torch.zeros(40))
        found = []
        for way in (compressor, Own):
            exchange = open_bucket_exchange("lane", [parameter], ["p"], way, Progress())
            random = torch.Generator().manual_seed(transport.rank)
            for _ in range(2):
                parameter.grad = torch.randn(40, generator=random)
                exchange.capture_gradients(weight, 2.0)
                exchange.exchange(exchange.bucket, transport)
                exchange.exchange.apply(exchange.bucket)
                found.append(parameter.grad.clone())
        return found

    for first, second, own_first, own_second in threads(3, program):
        assert torch.equal(first, own_first)
        assert torch.equal(second, own_second)
        assert not torch.equal(first, second)
        assert first.all()


def test_nodes_are_looked_for_once_also_while_the_density_warms_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    find_nodes = exchange.find_nodes

    def find(transport: Transport, node_size: int | None) -> list[list[int]]:
        looked.append(transport.rank)
        return find_nodes(transport, node_size)

    monkeypatch.setattr(exchange, "find_nodes", find)

    def program(transport: Transport) -> list[int]:
        progress, parameter = Progress(), torch.nn.Parameter(torch.zeros(100))
        compression = Compression.hierarchical(density=0.05, warmup_steps=3)
        made = open_bucket_exchange("lane", [parameter], ["p"], compression, progress)
        sizes = []
        for _ in range(4):
            parameter.grad = torch.arange(100.0)
            made.capture_gradients(0.5, 1.0)
            sizes.append(made.reduce(transport).selected)
            made.apply(())
            progress.steps += 1
        return sizes

    first, *others = run_ranks(local_world(2), program)
    assert all(each == first for each in others)
    assert len(set(first)) == len(first)  # another k in each step
    assert sorted(looked) == [0, 1]
