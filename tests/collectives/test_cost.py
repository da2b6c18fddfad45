"""The formulas: what the messages really add up to, and where two of them cross."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import SparseVector, reduce, run_ranks
from collectives.cost import (
    Link,
    break_even_bits_per_second,
    dense_bytes,
    dense_seconds,
    gtopk_seconds,
    gtopk_tree_seconds,
    rounds,
    topk_allgather_seconds,
)
from collectives.transports import local_world
from collectives.wire import HEADER_BYTES

ONE_SECOND_A_MESSAGE = Link(1.0, 0.0)
ONE_SECOND_A_BYTE = Link(0.0, 1.0)
LENGTH = 2520  # divisible by every number of ranks below
K = 24

FORMULAS: dict[str, Callable[[int, Link], float]] = {
    "dense": lambda ranks, link: dense_seconds(LENGTH, ranks, link),
    "topk-allgather": lambda ranks, link: topk_allgather_seconds(K, ranks, link),
    "gtopk-tree": lambda ranks, link: gtopk_tree_seconds(K, ranks, link),
    "gtopk": lambda ranks, link: gtopk_seconds(K, ranks, link),
}
every_formula = pytest.mark.parametrize("algorithm", FORMULAS)


def payload_bytes(algorithm: str, message: np.ndarray) -> int:
    """Return the bytes of the entries in a message: without headers, sizes told and alive bits."""
    if algorithm == "dense":
        return message.size
    if algorithm == "topk-allgather":
        lists = int(message[:8].view(np.int64)[0])
        return message.size - 8 - lists * (8 + HEADER_BYTES)
    return 8 * int(message[16:24].view(np.int64)[0])


@every_formula
@pytest.mark.parametrize("size", [*range(1, 10), 15])
def test_a_formula_is_what_the_messages_add_up_to(witness, algorithm: str, size: int) -> None:
    # All pick the same entries, so that every list that is merged has K of them, too.
    pick = SparseVector(np.arange(K, dtype=np.int32), np.ones(K, np.float32), LENGTH)
    world = witness(size)
    run_ranks(world.world, lambda t: reduce(pick, K, t, algorithm))
    by_round = world.rounds()
    formula = FORMULAS[algorithm]
    if algorithm == "dense":  # a ring here; the model grants the fewest messages there can be
        assert formula(size, ONE_SECOND_A_MESSAGE) <= len(by_round)
    else:
        assert formula(size, ONE_SECOND_A_MESSAGE) == len(by_round)
    largest = [max(payload_bytes(algorithm, message) for message in sent) for sent in by_round]
    assert formula(size, ONE_SECOND_A_BYTE) == pytest.approx(sum(largest))


@every_formula
def test_a_rank_alone_sends_nothing(algorithm: str) -> None:
    assert FORMULAS[algorithm](1, Link(1.0, 1.0)) == 0


@every_formula
@settings(max_examples=30)
@given(st.integers(1, 2000), st.floats(0, 1), st.floats(0, 1e-3))
def test_latency_and_bandwidth_add_up(
    algorithm: str, ranks: int, alpha: float, beta: float
) -> None:
    formula = FORMULAS[algorithm]
    together = formula(ranks, Link(alpha, beta))
    assert together == pytest.approx(formula(ranks, Link(alpha, 0)) + formula(ranks, Link(0, beta)))


def test_the_formulas_at_32_ranks_are_those_of_the_paper() -> None:
    # Shi et al. 2019, table I, an entry counted as two words of four bytes; log2(32) = 5.
    # Their dense is a ring, 62 alpha; ours has the latency of Rabenseifner's.
    alpha, beta, words, k = 0.436e-3, 3.6e-8, 25_557_032, 25_557
    link = Link(alpha, beta / 4)
    assert dense_seconds(words, 32, link) == pytest.approx(10 * alpha + 62 / 32 * words * beta)
    assert topk_allgather_seconds(k, 32, link) == pytest.approx(5 * alpha + 2 * 31 * k * beta)
    assert gtopk_tree_seconds(k, 32, link) == pytest.approx(10 * alpha + 4 * 5 * k * beta)
    assert gtopk_seconds(k, 32, link) == pytest.approx(5 * alpha + 2 * 5 * k * beta)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (1024, 10)]
)
def test_rounds_are_the_logarithm_rounded_up(ranks: int, expected: int) -> None:
    assert rounds(ranks) == expected


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dense_bytes_are_what_an_allreduce_sends(size: int, dtype: type) -> None:
    world = local_world(size, timeout_seconds=30)
    run_ranks(world, lambda t: t.allreduce(np.zeros(LENGTH, dtype)))
    share = dense_bytes(LENGTH, size, np.dtype(dtype).itemsize)
    assert [t.traffic.sent_bytes for t in world] == [share] * size


@pytest.mark.parametrize("length", [0, 1025, 1026, 2000])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_dense_bytes_are_the_mean_where_the_parts_are_uneven(size: int, length: int) -> None:
    world = local_world(size, timeout_seconds=30)
    run_ranks(world, lambda t: t.allreduce(np.zeros(length, np.float32)))
    mean = np.mean([t.traffic.sent_bytes for t in world])
    assert abs(mean - dense_bytes(length, size)) <= 0.5


def test_a_link_takes_the_seconds_that_its_bandwidth_says() -> None:
    link = Link.of(bits_per_second=1e9, latency_seconds=50e-6)
    assert link.latency_seconds == 50e-6
    assert link.seconds_per_byte * 125e6 == pytest.approx(1.0)


# ---- break-even


@settings(max_examples=100)
@given(
    st.integers(2, 256),
    st.integers(10_000, 10**9),
    st.floats(1e-4, 0.1),
    st.floats(0.1, 1e5),
    st.floats(0, 1e-3),
    st.sampled_from([topk_allgather_seconds, gtopk_tree_seconds, gtopk_seconds]),
)
def test_at_the_break_even_both_take_the_same_time(
    ranks: int,
    length: int,
    density: float,
    select_milliseconds: float,
    latency: float,
    formula: Callable[[int, int, Link], float],
) -> None:
    k = max(1, round(density * length))

    def dense(link: Link) -> float:
        return dense_seconds(length, ranks, link)

    def sparse(link: Link) -> float:
        return select_milliseconds / 1e3 + formula(k, ranks, link)

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


def test_a_break_even_worked_out_by_hand() -> None:
    # Two ranks, no latency: dense sends 4e9 bytes, sparse none but takes a second to select.
    found = break_even_bits_per_second(
        lambda link: dense_seconds(10**9, 2, link), lambda _: 1.0, latency_seconds=0.0
    )
    assert found == pytest.approx(4e9 * 8)


def test_sparse_may_always_win_or_never() -> None:
    def dense(link: Link) -> float:
        return dense_seconds(1000, 4, link)

    assert break_even_bits_per_second(dense, lambda link: dense(link) / 2, 1e-5) == math.inf
    assert break_even_bits_per_second(dense, lambda link: dense(link) * 2, 1e-5) is None
    assert break_even_bits_per_second(dense, dense, 1e-5) is None
