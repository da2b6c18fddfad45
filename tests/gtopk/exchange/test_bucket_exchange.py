"""BucketExchange: what of it may be asked in any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from collectives.transports import LocalTransport
from gtopk.compression import Compression, FP16Compressor
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
        parameter.grad[1] = 0.0  # by then it is there
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
    """The one casts into memory that it keeps, the other has a function called for each tensor."""

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
