"""The formulas: against counted messages, and the break-even of two methods."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import run_ranks
from collectives.cost import Link, break_even, break_even_bits_per_second, dense_bytes, rounds
from collectives.transports import local_world

LENGTH = 2520  # divisible by every number of ranks below


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (1024, 10)]
)
def test_rounds_are_the_logarithm_rounded_up(ranks: int, expected: int) -> None:
    assert rounds(ranks) == expected


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dense_bytes_equal_what_an_allreduce_sends(size: int, dtype: type) -> None:
    world = local_world(size, timeout_seconds=30)
    run_ranks(world, lambda t: t.allreduce(np.zeros(LENGTH, dtype)))
    share = dense_bytes(LENGTH, size, np.dtype(dtype).itemsize)
    assert [t.traffic.sent_bytes for t in world] == [share] * size


@pytest.mark.parametrize("length", [0, 1025, 1026, 2000])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_dense_bytes_are_the_mean_over_ranks_when_parts_are_uneven(size: int, length: int) -> None:
    world = local_world(size, timeout_seconds=30)
    run_ranks(world, lambda t: t.allreduce(np.zeros(length, np.float32)))
    mean = np.mean([t.traffic.sent_bytes for t in world])
    assert abs(mean - dense_bytes(length, size)) <= 0.5


def test_link_seconds_per_byte_follow_from_its_bandwidth() -> None:
    link = Link.of(bits_per_second=1e9, latency_seconds=50e-6)
    assert link.latency_seconds == 50e-6
    assert link.seconds_per_byte * 125e6 == pytest.approx(1.0)


# ---- break-even


def seconds(messages: float, sent_bytes: float) -> Callable[[Link], float]:
    """Return what so many messages with so many bytes take on a link."""
    return lambda link: messages * link.latency_seconds + sent_bytes * link.seconds_per_byte


@settings(max_examples=100)
@given(
    st.integers(1, 500),
    st.integers(10_000, 10**10),
    st.integers(1, 500),
    st.integers(0, 10**8),
    st.floats(0.1, 1e5),
    st.floats(0, 1e-3),
)
def test_dense_and_sparse_take_the_same_time_at_break_even(
    dense_messages: int,
    all_bytes: int,
    sparse_messages: int,
    few_bytes: int,
    select_milliseconds: float,
    latency: float,
) -> None:
    dense = seconds(dense_messages, all_bytes)

    def sparse(link: Link) -> float:
        return select_milliseconds / 1e3 + seconds(sparse_messages, few_bytes)(link)

    found = break_even_bits_per_second(dense, sparse, latency)
    slowest, fastest = Link.of(1e3, latency), Link.of(1e13, latency)
    if found is None:
        assert sparse(slowest) >= dense(slowest)
    elif math.isinf(found):
        assert sparse(fastest) < dense(fastest)
    else:
        link = Link.of(found, latency)
        assert sparse(link) == pytest.approx(dense(link), rel=1e-6)
        slower, faster = Link.of(found / 2, latency), Link.of(found * 2, latency)
        assert sparse(slower) < dense(slower)
        assert sparse(faster) > dense(faster)


def test_break_even_equals_a_hand_calculation() -> None:
    # Two ranks, no latency: dense sends 4e9 bytes, sparse none but takes a second to select.
    found = break_even_bits_per_second(
        seconds(0, dense_bytes(10**9, 2)), lambda _: 1.0, latency_seconds=0.0
    )
    assert found == pytest.approx(4e9 * 8)


def test_break_even_is_infinite_or_none_when_one_method_always_wins() -> None:
    dense = seconds(4, 6000)
    assert break_even_bits_per_second(dense, lambda link: dense(link) / 2, 1e-5) == math.inf
    assert break_even_bits_per_second(dense, lambda link: dense(link) * 2, 1e-5) is None
    assert break_even_bits_per_second(dense, dense, 1e-5) is None


def test_break_even_bounds_are_where_one_method_takes_a_fifth_longer() -> None:
    """Dense sends 4 GB, sparse takes a second: 32 Gbit/s, and times that change is its own."""
    dense = seconds(0, dense_bytes(10**9, 2))
    found = break_even(dense, lambda _: 1.0, latency_seconds=0.0)
    assert found == pytest.approx((32e9, 32e9 / 1.2, 32e9 * 1.2, False))
    assert break_even(dense, lambda link: dense(link) / 2, 0.0) == (math.inf,) * 3 + (False,)
    either = break_even(dense, lambda link: dense(link) * 1.1, 1e-5)
    assert either == (None, 0.0, math.inf, False)


def test_sparse_with_more_bytes_in_fewer_rounds_pays_above_break_even() -> None:
    """Dense waits 4 s and sends 8 Gbit, sparse 2 s and 16: both take 6 s at 4 Gbit/s."""
    dense, latency = seconds(4, 10**9), 1.0

    def edge(gigabits: float, factor: float) -> float:
        return max(0.0, (gigabits - 8 * factor) / (4 * factor - 2) * 1e9)

    for gigabits in (16.0, 8.8):
        sparse = seconds(2, round(gigabits / 8 * 1e9))
        expected = (*(edge(gigabits, factor) for factor in (1.0, 1.2, 1 / 1.2)), True)
        assert break_even(dense, sparse, latency) == pytest.approx(expected)
    assert break_even(dense, seconds(2, 8 * 10**8), latency) == (math.inf,) * 3 + (False,)
    assert break_even(dense, seconds(6, 4 * 10**9), latency) == (None, 0.0, 0.0, False)
