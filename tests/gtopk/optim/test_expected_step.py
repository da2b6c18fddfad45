"""The predicted time of a step, and rank 0's message about it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Calibration, Candidate, Network, predict
from collectives.transports import LocalTransport
from gtopk.compression import Compression
from gtopk.exchange.bucket_exchange import BucketExchange, open_bucket_exchange
from gtopk.exchange.exchange import Progress
from gtopk.exchange.sparse_gradients import SparseGradientExchange
from gtopk.optim.bucket_plan import count_buckets
from gtopk.optim.expected_step import ExpectedStep
from gtopk.planning.advice import advice
from gtopk.runtime.world import world
from gtopk.units import seconds_text
from tests.gtopk.four_layers import distribute, inputs, layers

SLOW = Calibration(Network(8, Link.of(1e8, 50e-6)), DEFAULT_RATES, "made up")
GTOPK = Compression.gtopk(density=0.001)


def bucket_exchange(values: int, compression: object) -> BucketExchange:
    parameter = torch.nn.Parameter(torch.zeros(1).expand(values))
    return open_bucket_exchange("lane", [parameter], ["parameter"], compression, Progress())


def embedding(values: int) -> SparseGradientExchange:
    return SparseGradientExchange("embedding", torch.nn.Parameter(torch.zeros(values, 1)), "weight")


def peers(rank: int = 0, size: int = 8, takes_part: bool = True) -> Any:
    """Return some of a world's 8 ranks, with a calibration."""
    transport = SimpleNamespace(name="made up", library=lambda: "threads")
    here = SimpleNamespace(rank=rank, size=8, advised=False, transport=transport)
    return SimpleNamespace(
        size=size, world=here, takes_part=takes_part, run=lambda *operation, **flags: SLOW
    )


def logged_advice(bucket_exchanges: list[Any], caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "gtopk"):
        ExpectedStep(GTOPK, Progress()).measure(bucket_exchanges, peers())
    return caplog.text


def test_predicted_saving_excludes_uncompressed_buckets(caplog: pytest.LogCaptureFixture) -> None:
    ours = [bucket_exchange(600_000, GTOPK), bucket_exchange(400_000, GTOPK)]
    alone = logged_advice(ours, caplog)
    beside = logged_advice(
        [*ours, bucket_exchange(9_000_000, Compression.none), embedding(7)], caplog
    )
    assert "1,000,000 values, 8 ranks" in alone
    assert "1,000,000 values (and 9,000,007 uncompressed either way), 8 ranks" in beside
    assert beside.partition(", 8 ranks")[2] == alone.partition(", 8 ranks")[2]


@pytest.mark.parametrize("is_compressed", [True, False])
def test_advice_compares_with_the_buckets_the_alternative_would_have(
    is_compressed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds for planned buckets; given ones are the same for both."""
    runs, other = (GTOPK, None) if is_compressed else (None, GTOPK)
    parameters = [torch.nn.Parameter(torch.zeros(1_000_000)) for _ in range(10)]
    names = [str(number) for number in range(10)]
    one = open_bucket_exchange("lane", parameters, names, runs or Compression.none, Progress())
    count = count_buckets(other, [1_000_000] * 10, 8)
    assert count > 1
    for is_planned, buckets in ((True, count), (False, 1)):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "gtopk"):
            ExpectedStep(runs, Progress(), is_planned=is_planned).measure([one], peers())
        advised = advice(runs, [10_000_000], SLOW, other_buckets=buckets, over="threads")
        assert caplog.messages == [advised.sentence, advised.explain()]


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_advice_without_compression_is_about_compressible_values(
    compression: object, caplog: pytest.LogCaptureFixture
) -> None:
    output = logged_advice([bucket_exchange(1_000_000, compression), embedding(7)], caplog)
    assert "1,000,000 values (and 7 uncompressed either way), 8 ranks" in output
    assert ": would save" in output


@pytest.mark.parametrize(
    ("compression", "dtype", "value_bytes"),
    [
        (Compression.none, torch.float32, 4),
        (Compression.none, torch.bfloat16, 4),  # sums are float32
        (Compression.none, torch.float64, 8),
        (Compression.fp16, torch.float32, 2),
        (Compression.bf16, torch.float64, 2),
        (GTOPK, torch.float64, 8),
    ],
)
def test_dense_prediction_uses_the_dtype_on_the_wire(
    compression: object, dtype: torch.dtype, value_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype).expand(10**6))
    one = open_bucket_exchange("lane", [parameter], ["parameter"], compression, Progress())
    dense = predict(Candidate("dense"), 10**6, SLOW.network, SLOW.rates, value_bytes).seconds
    agreed = SLOW.network.expected_agreement_seconds
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "gtopk"):
        expected = ExpectedStep(compression, Progress())
        expected.measure([one], peers())
    assert f": dense {seconds_text(dense + agreed)}, " in caplog.text
    if compression is GTOPK:
        assert expected.dense_seconds == dense
        sparse = predict(GTOPK.candidate(*GTOPK.formats()), 10**6, SLOW.network, SLOW.rates, 8)
        saved = seconds_text(dense - sparse.seconds)
        assert f"saves up to {saved} of dense's" in caplog.text


def test_sparse_gradients_alone_log_no_advice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not logged_advice([embedding(7)], caplog)
    assert not logged_advice([SimpleNamespace(elements=0)], caplog)


def test_advice_is_logged_once_per_world_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    bucket_exchanges, here = [bucket_exchange(1000, GTOPK)], peers()
    with caplog.at_level(logging.INFO, "gtopk"):
        for one in (here, here, peers(rank=1)):
            expected = ExpectedStep(GTOPK, Progress(), "an outer step")
            expected.measure(bucket_exchanges, one)
            assert expected.seconds
    assert caplog.text.count("an outer step") == len(caplog.records) == 1


@pytest.mark.parametrize(("others", "is_expected"), [({}, True), ({"takes_part": False}, False)])
def test_prediction_is_made_only_by_ranks_of_the_process_set(
    others: dict[str, bool], is_expected: bool
) -> None:
    expected = ExpectedStep(GTOPK, Progress())
    expected.measure([bucket_exchange(1000, GTOPK)], peers(size=4, **others))
    assert (expected.seconds is not None) == is_expected


def test_single_rank_predicts_no_seconds() -> None:
    expected = ExpectedStep(GTOPK, Progress())
    expected.measure([bucket_exchange(1000, GTOPK)], peers(size=1))
    assert expected.seconds is None


def test_warm_up_steps_have_no_predicted_seconds(monkeypatch, threads) -> None:
    def program(transport: LocalTransport) -> list[bool]:
        has_prediction, model = [], layers()
        with world.entered(transport):
            optimizer = distribute(model, Compression.gtopk(0.1, warmup_steps=3))
            for step in range(6):
                model(inputs(transport.rank, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                has_prediction.append(optimizer.last_step.predicted_seconds is not None)
        return has_prediction

    def measure(self: ExpectedStep, *others: Any) -> None:
        self._calibration = SLOW
        self.expect(others[0])

    monkeypatch.setattr(ExpectedStep, "measure", measure)
    assert threads(2, program) == [[False] * 3 + [True] * 3] * 2


def test_prediction_follows_the_bucket_exchanges() -> None:
    expected = ExpectedStep(GTOPK, Progress())
    expected.measure([bucket_exchange(1000, GTOPK)], peers())
    before = expected.seconds
    expected.expect([bucket_exchange(1_000_000, GTOPK)])
    assert before is not None
    assert expected.seconds is not None
    assert expected.seconds > before
