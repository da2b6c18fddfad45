"""A profiler's ranges of an exchange have the durations of the step's report."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collectives.kernels
import collectives.wire.message
import gtopk.exchange.bucket_exchange
import gtopk.exchange.buckets.arrays
import gtopk.exchange.exchange
from collectives.transports import Transport
from gtopk.exchange.bucket_exchange import open_bucket_exchange
from gtopk.exchange.exchange import Exchanged, Progress
from gtopk.exchange.residual import Residual
from gtopk.integrations.passes import PassTransaction
from gtopk.torch import Compression

Seconds = Counter[str]


class Clock(threading.local):
    """A clock per rank that only work advances."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Ranges(threading.local):
    """A fake of torch's record_function that records how long each rank's ranges are open."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: Seconds = Counter()

    def __call__(self, name: str) -> Any:
        ranges = self

        class Range:
            def __enter__(self) -> None:
                ranges.seconds[name] -= ranges.clock.now

            def __exit__(self, *error: Any) -> None:
                ranges.seconds[name] += ranges.clock.now

        return Range()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """Run a profiler, and give each part of an exchange its own duration."""
    clock = Clock()
    for module in (
        gtopk.exchange.exchange,
        gtopk.exchange.buckets.arrays,
        gtopk.exchange.bucket_exchange,
        collectives.wire.message,
    ):
        monkeypatch.setattr(module, "time", clock)

    def takes(where: Any, what: str, seconds: float) -> None:
        works = getattr(where, what)

        def work(*given: Any, **options: Any) -> Any:
            clock.now += seconds
            return works(*given, **options)

        monkeypatch.setattr(where, what, work)

    takes(Residual, "accumulate_and_select", 1)
    takes(collectives.wire.message, "_encode", 10)
    takes(collectives.wire.message, "_decode", 100)
    takes(collectives.kernels._for_numpy, "merge", 1000)
    takes(Residual, "remove_sent", 10_000)
    ranges = Ranges(clock)
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", ranges)
    return ranges


def test_profiler_ranges_add_up_to_the_reported_seconds(
    ranges: Ranges, threads: Callable[..., list[tuple[Exchanged, Seconds]]]
) -> None:
    def program(transport: Transport) -> tuple[Exchanged, Seconds]:
        parameter = torch.nn.Parameter(torch.zeros(40))
        parameter.grad = torch.arange(40.0) * (1 + transport.rank)
        bucket_exchange = open_bucket_exchange(
            "bucket", [parameter], ["weight"], Compression.gtopk(0.1), Progress()
        )
        bucket_exchange.capture_gradients(0.5, 1.0)
        transaction = PassTransaction()
        transaction.run(transaction.add(bucket_exchange), transport, [0, 0])
        return transaction.exchanged[0], ranges.seconds

    for exchanged, seconds in threads(2, program):
        assert seconds["gtopk::select"] + seconds["gtopk::apply"] == exchanged.select_seconds
        assert seconds["gtopk::exchange"] == exchanged.communicate_seconds
        assert seconds["gtopk::encode"] + seconds["gtopk::decode"] == exchanged.coded.seconds
        assert seconds == {
            "gtopk::select": 1,
            "gtopk::encode": 10,
            "gtopk::decode": 100,
            "gtopk::merge": 1000,
            "gtopk::exchange": 1110,
            "gtopk::apply": 10_000,
        }
