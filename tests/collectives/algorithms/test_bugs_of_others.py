"""Regression tests for bugs of other implementations."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import SparseVector, reduce, run_ranks
from collectives.transports import local_world
from tests.collectives.algorithms.worlds import (
    TRUNCATING,
    assert_nothing_is_lost,
    bits,
    entries,
    every_algorithm,
    every_size,
    integer_picks,
    pairs_of,
    random_picks,
    run,
)


@every_size
def test_gtopk_sums_all_picks_for_any_number_of_ranks(
    size: int, random: np.random.Generator
) -> None:
    # An implementation ran log2(P) rounds of pairs, and overran its list of ranks or hung.
    picks = integer_picks(random, size, 60, 20)
    for update, _ in run("gtopk", picks, 60):
        assert update.to_dense().tolist() == sum(pick.to_dense() for pick in picks).tolist()


@every_algorithm
def test_k_may_change_from_call_to_call(algorithm: str, random: np.random.Generator) -> None:
    # An implementation sized its buffer with the first k: a larger k overran it, a smaller one
    # returned the tail of the previous result.
    world = local_world(3, timeout_seconds=30)
    for k in (2, 30, 1, 7):
        picks = random_picks(random, 3, 100, k)
        outcomes = run_ranks(world, lambda t, p=picks, k=k: reduce(p[t.rank], k, t, algorithm))
        assert_nothing_is_lost(picks, outcomes)
        assert bits(outcomes[0][0]) == bits(run(algorithm, picks, k)[0][0])


@pytest.mark.parametrize("algorithm", ["dense", "topk-allgather", *TRUNCATING])
def test_lists_of_different_lengths_are_summed_to_their_ends(algorithm: str) -> None:
    # An implementation split the gathered lists into equal parts.
    picks = [
        entries([(index, 1.0) for index in range(rank * 10, rank * 10 + count)], 40, np.float32)
        for rank, count in enumerate([1, 9, 0, 4])
    ]
    expected = sum(pick.to_dense() for pick in picks)
    for update, _ in run(algorithm, picks, 20):
        assert update.to_dense().tolist() == expected.tolist()


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
def test_indices_beyond_float32_precision_arrive_exactly(algorithm: str) -> None:
    # Implementations sent indices as float32, which is exact only up to 2^24, or as 16 bits.
    last = [2**16, 2**24 + 1, 2**31 - 2]
    picks = [entries([(index, 1.0)], 2**31 - 1, np.float32) for index in last]
    for update, _ in run(algorithm, picks, 3):
        assert update.indices.tolist() == last


@pytest.mark.parametrize("algorithm", ["topk-allgather", *TRUNCATING])
def test_vectors_longer_than_2_31_elements_are_reduced(algorithm: str) -> None:
    length = 2**40
    picks = [
        SparseVector(np.array([7, 2**31 + rank]), np.array([1.0, 2.0 + rank]), length)
        for rank in range(3)
    ]
    for update, _ in run(algorithm, picks, 4):
        assert pairs_of(update) == [(7, 3), (2**31, 2), (2**31 + 1, 3), (2**31 + 2, 4)]
        assert update.indices.dtype == np.int64


@every_algorithm
def test_fewer_picks_than_ranks_are_reduced(algorithm: str) -> None:
    # An implementation divided the number of picks by the number of ranks.
    picks = [SparseVector.empty(30)] * 8 + [entries([(29, 1.0)], 30, np.float32)]
    for update, _ in run(algorithm, picks, 1):
        assert pairs_of(update) == [(29, 1.0)]


@every_algorithm
def test_next_call_leaves_earlier_results_unchanged(
    algorithm: str, random: np.random.Generator
) -> None:
    # An implementation returned views of a buffer that the next call overwrote.
    world = local_world(3, timeout_seconds=30)
    first, second = (random_picks(random, 3, 50, 5) for _ in range(2))
    outcomes = run_ranks(world, lambda t: reduce(first[t.rank], 5, t, algorithm))
    before = [(bits(update), bits(returned)) for update, returned in outcomes]
    run_ranks(world, lambda t: reduce(second[t.rank], 5, t, algorithm))
    assert [(bits(update), bits(returned)) for update, returned in outcomes] == before
