"""BucketExchange: what of it may be asked in any thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gtopk.compression import Compression
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
