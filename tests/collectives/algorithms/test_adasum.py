"""Adasum averages parallel vectors, adds orthogonal ones, and gives every rank the same bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import MessageError, local_world, run_ranks
from collectives.algorithms import adasum
from collectives.kernels.narrow import BFLOAT16, narrow, widen
from collectives.transports import LocalTransport
from tests.collectives.algorithms.adasum_tree import Vector, tree
from tests.collectives.algorithms.worlds import rendezvous_world

SIZES = range(1, 10)
DTYPES = [np.float16, np.float32, np.float64]


def combined(
    vectors: Sequence[Vector],
    segments: Sequence[int] | None = None,
    make_world: Callable[[int], list[LocalTransport]] = local_world,
) -> Vector:
    """Return the result of all ranks, after checking that it has the same bits everywhere."""
    outcomes = [vector.copy() for vector in vectors]
    world = make_world(len(vectors))
    run_ranks(world, lambda t: adasum.allreduce(t, outcomes[t.rank], segments))
    assert len({outcome.tobytes() for outcome in outcomes}) == 1
    assert outcomes[0].dtype == vectors[0].dtype
    return outcomes[0]


def random_vectors(random: np.random.Generator, size: int, length: int) -> list[Vector]:
    """Return vectors that are neither parallel nor orthogonal."""
    common = random.standard_normal(length)
    return [common + random.standard_normal(length) for _ in range(size)]


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    """Return lengths with the sum `length`, including zeros."""
    bounds = st.lists(st.integers(0, length), max_size=5).map(lambda b: [0, *sorted(b), length])
    return bounds.map(lambda b: np.diff(b).tolist())


@pytest.mark.parametrize("size", SIZES)
def test_orthogonal_vectors_add(size: int, random: np.random.Generator) -> None:
    values = random.standard_normal(5 * size)
    vectors = [np.where(np.arange(5 * size) % size == rank, values, 0.0) for rank in range(size)]
    assert combined(vectors).tolist() == values.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_equal_vectors_are_unchanged(size: int, random: np.random.Generator) -> None:
    vector = random.integers(-9, 9, 23).astype(np.float32)  # with exact dot products
    assert combined([vector] * size).tolist() == vector.tolist()


def test_parallel_vectors_are_averaged() -> None:
    one = np.array([2.0, -4.0, 6.0])
    assert combined([one, 3 * one]).tolist() == (2 * one).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_zero_vectors_leave_a_single_nonzero_vector_unchanged(
    size: int, random: np.random.Generator
) -> None:
    vector = random.standard_normal(17)
    zeros = np.zeros_like(vector)
    for rank in range(size):
        vectors = [vector if other == rank else zeros for other in range(size)]
        assert combined(vectors).tolist() == vector.tolist()
    assert combined([zeros] * size).tolist() == zeros.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_result_scales_with_a_factor_common_to_all_vectors(
    size: int, random: np.random.Generator
) -> None:
    vectors = random_vectors(random, size, 40)
    scaled = combined([vector * 2.0**-30 for vector in vectors])
    assert scaled.tolist() == (combined(vectors) * 2.0**-30).tolist()


@settings(max_examples=60)
@given(st.data())
def test_result_equals_recursive_reference(data: st.DataObject) -> None:
    size, length = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 30))
    dtype = data.draw(st.sampled_from(DTYPES))
    # Either few values, for ties, zeros, parallel and opposite vectors, or arbitrary numbers.
    few_values = st.sampled_from([-1.0, -0.5, 0.0, 0.0, 1.0, 2.0])
    values = data.draw(st.sampled_from([few_values, st.floats(-100, 100, width=16)]))
    row = st.lists(values, min_size=length, max_size=length)
    vectors = [np.array(data.draw(row), dtype) for _ in range(size)]
    segments = data.draw(cuts(length))
    ends = np.cumsum([0, *segments])
    parts = [
        tree([vector[start:end] for vector in vectors]) for start, end in itertools.pairwise(ends)
    ]
    expected = np.concatenate(parts).astype(np.float64)
    # The norm of a sum is at most the sum of norms; each round may be off by a few ulps.
    largest = sum(np.linalg.norm(vector.astype(np.float64)) for vector in vectors)
    bound = 40 * np.finfo(dtype).eps * largest + 10 * np.finfo(dtype).smallest_subnormal
    assert np.abs(combined(vectors, segments) - expected).max(initial=0.0) <= bound


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_longer_than_a_block_equal_recursive_reference(
    size: int, dtype: type[np.floating], random: np.random.Generator
) -> None:
    segments = [3, 40_001, 0, 100_000]
    vectors = [v.astype(dtype) for v in random_vectors(random, size, sum(segments))]
    ends = np.cumsum([0, *segments])
    expected = np.concatenate(
        [tree([v[a:b] for v in vectors]) for a, b in itertools.pairwise(ends) if b > a]
    )
    tolerance = 20 * np.finfo(dtype).eps
    np.testing.assert_allclose(combined(vectors, segments), expected, tolerance, tolerance)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_value_affects_only_its_segment(
    size: int, bad: float, random: np.random.Generator
) -> None:
    vectors = random_vectors(random, size, 30)
    expected = combined(vectors, [10, 12, 8])
    vectors[size - 1][13] = bad
    expected[10:22] = math.nan
    np.testing.assert_array_equal(combined(vectors, [10, 12, 8]), expected)


@pytest.mark.parametrize("size", SIZES)
def test_rank_sends_two_vectors_and_the_dot_products(size: int) -> None:
    length, segments = 1 << 12, 3
    world = local_world(size)
    run_ranks(
        world,
        lambda t: adasum.allreduce(t, np.ones(length, np.float32), [length - 2, 1, 1]),
    )
    rounds = int(math.log2(size))
    paired, vector_bytes = 2**rounds, 4 * length
    halves = 2 * vector_bytes * (paired - 1) // paired
    dots = 3 * 8 * segments * rounds * (rounds + 1) // 2
    for rank, transport in enumerate(world):
        folded = rank >= paired or rank + paired < size
        expected = folded * vector_bytes + (rank < paired) * (halves + dots)
        assert transport.traffic.sent_bytes == expected


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_is_combined_in_float64_and_rounded_once_a_pair(
    size: int, random: np.random.Generator
) -> None:
    vectors = [
        narrow(vector.astype(np.float32), BFLOAT16) for vector in random_vectors(random, size, 300)
    ]
    exact = combined([widen(vector).astype(np.float64) for vector in vectors])
    outcome = widen(combined(vectors))
    largest = max(float(np.abs(widen(vector)).max()) for vector in vectors)
    assert np.abs(outcome - exact).max() <= 2.0**-8 * size * largest


@pytest.mark.parametrize("size", SIZES)
def test_adasum_with_rendezvous_sends_does_not_deadlock(
    size: int, random: np.random.Generator
) -> None:
    vectors = random_vectors(random, size, 50)
    expected = combined(vectors, [20, 30])
    assert combined(vectors, [20, 30], rendezvous_world).tolist() == expected.tolist()


def test_arrays_of_different_sizes_are_refused(threads: Callable[..., list[object]]) -> None:
    def program(transport: LocalTransport) -> None:
        array = np.ones(8 << transport.rank)
        with pytest.raises(MessageError, match=f"from rank {1 - transport.rank} is malformed"):
            adasum.allreduce(transport, array)

    threads(2, program)


@pytest.mark.parametrize("segments", [[4], [2, 4], [-1, 6], []])
def test_segments_that_do_not_add_up_to_the_length_are_refused(segments: list[int]) -> None:
    with pytest.raises(ValueError, match=r"add up to 5 \(the array's\)"):
        adasum.allreduce(local_world(1)[0], np.ones(5), segments)


@pytest.mark.parametrize("dtype", [np.int64, np.complex128, np.uint8])
def test_non_float_dtypes_are_refused(dtype: type) -> None:
    with pytest.raises(ValueError, match=f"float64, got {np.dtype(dtype)}"):
        adasum.allreduce(local_world(1)[0], np.ones(5, dtype))
