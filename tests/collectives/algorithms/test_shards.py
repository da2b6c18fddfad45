"""Shards: every element is sent in turn, nothing is lost, all ranks agree, and bytes are few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, run_ranks
from collectives.algorithms import shards
from collectives.cost_model import DEFAULT_RATES, Candidate, Network, predict
from collectives.cost_model.calibration import ASSUMED_LINK
from collectives.errors import NonFiniteError
from collectives.transports import Transport, local_world
from collectives.wire import VALUE_CODES, WHOLE, Format

by_code = pytest.mark.parametrize("code", VALUE_CODES)
every_size = pytest.mark.parametrize("size", range(1, 10))


@pytest.mark.parametrize("period", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 255, 256, 257, 1024, 1025, 2500])
def test_every_element_is_in_one_shard(length: int, period: int) -> None:
    like = np.zeros(length, np.float32)
    each = [shards.shard_indices(shard, period, like) for shard in range(period)]
    assert sorted(np.concatenate(each).tolist()) == list(range(length))
    assert all((np.diff(indices) > 0).all() for indices in each)


def test_shards_are_interleaved_blocks_as_drawn() -> None:
    like = np.zeros(5 * 256 - 6)
    first, second = (shards.shard_indices(shard, 2, like) for shard in (0, 1))
    assert (first // 256).tolist() == [0] * 256 + [2] * 256 + [4] * 250
    assert (second // 256).tolist() == [1] * 256 + [3] * 256


def training(
    size: int, gradients: np.ndarray, period: int, code: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exchange every step's gradients, [steps, ranks, n]; return the final state.

    The sum of all updates [ranks, n], the residuals [ranks, n] and all owner errors [ranks, n].
    """
    length = gradients.shape[2]

    def rank(transport: Transport) -> tuple[np.ndarray, ...]:
        residual, errors, applied = (np.zeros(length, gradients.dtype) for _ in range(3))
        for step, rank_gradients in enumerate(gradients):
            residual += rank_gradients[transport.rank]
            indices = shards.shard_indices(step % period, period, residual)
            own = indices[shards.own_part(indices.size, transport)]
            shared = shards.reduce(residual[indices], errors[own], transport, code=code)
            applied[indices] += shared.update
            residual[indices] = shared.lost
            errors[own] = shared.kept
        return applied, residual, errors

    applied, residuals, errors = zip(*run_ranks(local_world(size), rank), strict=True)
    return np.array(applied), np.array(residuals), np.array(errors)


@every_size
@by_code
def test_nothing_is_lost_and_all_ranks_apply_the_same_update(
    size: int, code: str, random: np.random.Generator
) -> None:
    gradients = random.standard_normal((9, size, 1500)) * 10.0 ** random.integers(-3, 3, 1500)
    applied, residuals, errors = training(size, gradients, 4, code)
    assert all(one.tobytes() == applied[0].tobytes() for one in applied)
    total = applied[0] + residuals.sum(0) + errors.sum(0)
    scale = np.abs(gradients).sum((0, 1))
    assert (np.abs(total - gradients.sum((0, 1))) <= 1e-12 * scale).all()
    assert applied.any()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 700),
    st.integers(1, 5),
    st.sampled_from([*VALUE_CODES]),
    st.integers(0, 2**32),
)
def test_nothing_is_lost_for_any_length_and_period(
    size: int, length: int, period: int, code: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    # Integers, so that sums are exact.
    gradients = random.integers(-100, 100, (2 * period, size, length)).astype(np.float64)
    applied, residuals, errors = training(size, gradients, period, code)
    total = applied[0] + residuals.sum(0) + errors.sum(0)
    assert total.tolist() == gradients.sum((0, 1)).tolist()


@every_size
def test_exact_values_are_summed_without_error(size: int, random: np.random.Generator) -> None:
    gradients = random.integers(-9, 9, (4, size, 2000)).astype(np.float32)
    applied, _, errors = training(size, gradients, 1, "exact")
    assert applied[0].tolist() == gradients.sum((0, 1)).tolist()
    assert not errors.any()


def test_owner_sends_its_kept_error_in_following_steps() -> None:
    # With 2 bits a part's sum is -1, 0 or 1 times half of the largest. The other half is kept and
    # sent in the following steps, although their gradients are zero.
    gradients = np.zeros((6, 2, 2))
    gradients[0] = [[1.0, -0.3], [1.0, -0.3]]
    applied, residuals, errors = training(2, gradients, 1, "int2")
    total = applied[0] + residuals.sum(0) + errors.sum(0)
    assert total.tolist() == pytest.approx([2.0, -0.6], abs=1e-15)
    assert applied[0] == pytest.approx([2.0, -0.6], abs=0.1)


# ---- errors


@pytest.mark.parametrize("how", ["nan", "refuses"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_non_finite_or_refusing_rank_is_named_on_all_ranks(size: int, how: str) -> None:
    def rank(transport: Transport) -> None:
        values = np.ones(300, np.float32)
        last = transport.rank == size - 1
        if last and how == "nan":
            values[7] = np.nan
        own = shards.own_part(300, transport)
        with pytest.raises(NonFiniteError, match=f"rank {size - 1}"):
            shards.reduce(
                values,
                np.zeros(own.stop - own.start, np.float32),
                transport,
                refuses=last and how == "refuses",
            )
        again = shards.reduce(
            np.ones(300, np.float32), np.zeros(own.stop - own.start, np.float32), transport
        )
        assert np.isfinite(again.update).all()

    run_ranks(local_world(size), rank)


def test_overflowing_sum_raises_on_all_ranks() -> None:
    def rank(transport: Transport) -> None:
        own = shards.own_part(300, transport)
        kept = np.zeros(own.stop - own.start, np.float32)
        with pytest.raises(NonFiniteError):
            shards.reduce(np.full(300, 3e38, np.float32), kept, transport)

    run_ranks(local_world(3), rank)


def test_ranks_with_different_codes_get_an_error() -> None:
    def rank(transport: Transport) -> None:
        own = shards.own_part(300, transport)
        code = "int3" if transport.rank else "int4"
        with pytest.raises(MessageError, match=r"format is whole/int. where this rank's is whole"):
            shards.reduce(np.ones(300), np.zeros(own.stop - own.start), transport, code=code)

    run_ranks(local_world(2, timeout_seconds=30), rank)


def test_ranks_with_different_shards_get_error_that_quotes_both() -> None:
    def rank(transport: Transport) -> None:
        own = shards.own_part(300, transport)
        kept = np.zeros(own.stop - own.start)
        text = r"rank . exchanges shard [23], but this rank exchanges shard [23]; every rank"
        with pytest.raises(MessageError, match=text):
            shards.reduce(np.ones(300), kept, transport, shard=2 + transport.rank)

    run_ranks(local_world(2, timeout_seconds=30), rank)


# ---- the cost


def sent(size: int, length: int, code: str) -> Any:
    def rank(transport: Transport) -> tuple[int, int]:
        own = shards.own_part(length, transport)
        values = np.ones(length, np.float32)
        shards.reduce(values, np.zeros(own.stop - own.start, np.float32), transport, code=code)
        return transport.traffic.sent_bytes, transport.traffic.sent_messages

    return run_ranks(local_world(size), rank)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("code", ["int2", "int3", "int8", "exact"])
def test_cost_model_predicts_bytes_and_messages(size: int, code: str) -> None:
    length = 4 * 840 * 256
    candidate = Candidate("shards", 0.25, Format(WHOLE, code))
    predicted = predict(candidate, length, Network(size, ASSUMED_LINK), DEFAULT_RATES)
    seen = sent(size, length // 4, code)
    for sent_bytes, messages in seen:
        assert messages == predicted.sent.messages
        assert sent_bytes == pytest.approx(predicted.sent.bytes, rel=0.002)
        assert sent_bytes <= predicted.sent.most_bytes + size
    assert predicted.updated == length / 4
    assert predicted.lag_steps == 1.5


def test_int3_quarter_shards_send_a_fortieth_of_dense_bytes() -> None:
    length, size = 1_000_000, 4
    seen = sent(size, length // 4, "int3")
    dense = 2 * 4 * length * (size - 1) / size
    assert all(dense / sent_bytes > 42 for sent_bytes, _ in seen)
