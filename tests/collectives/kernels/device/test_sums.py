"""Merging and summing on a GPU against the NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collectives.kernels import reference
from collectives.kernels.device.entries import merge, sum_by_index
from collectives.kernels.device.machine import Scratch
from collectives.vector import SparseVector

FEW = [-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]  # many ties, and sums that cancel
dtypes = st.sampled_from([np.float32, np.float64])


def sparse(dense: np.ndarray) -> SparseVector:
    return SparseVector.from_dense(dense)


def put(machine: Any, vector: SparseVector) -> SparseVector:
    return SparseVector(machine.put(vector.indices), machine.put(vector.values), vector.length)


def assert_same(machine: Any, got: SparseVector, expected: SparseVector) -> None:
    assert machine.fetch(got.indices).tolist() == expected.indices.tolist()
    assert machine.fetch(got.values).tobytes() == expected.values.tobytes()
    assert got.indices.dtype == expected.indices.dtype
    assert got.length == expected.length


@st.composite
def lists(draw: st.DrawFn, counts: st.SearchStrategy[int]) -> list[SparseVector]:
    dtype, length = draw(dtypes), draw(st.integers(1, 200))
    values = st.sampled_from(FEW) | st.floats(-(2.0**100), 2.0**100, width=32)
    return [
        sparse(draw(arrays(dtype, length, elements=values, fill=st.just(0.0))))
        for _ in range(draw(counts))
    ]


@settings(max_examples=60)
@given(lists(st.just(2)), st.integers(1, 250))
def test_merge_equals_the_reference_to_the_bit(
    scratch: Scratch, pair: list[SparseVector], k: int
) -> None:
    a, b = (put(scratch.machine, vector) for vector in pair)
    expected = reference.merge(*pair, k)
    for got in (merge(scratch, a, b, k), merge(scratch, b, a, k)):  # both partners
        assert_same(scratch.machine, got, expected)


@pytest.mark.parametrize("overlap", [0, 100, 3000])
@pytest.mark.parametrize("k", [1, 2500, 3000, 4000, 6000])
def test_merge_of_lists_longer_than_all_threads_equals_the_reference(
    scratch: Scratch, overlap: int, k: int, random: np.random.Generator
) -> None:
    length = 100_000
    a = random.choice(length, 3000, replace=False)
    b = np.concatenate([a[:overlap], np.setdiff1d(np.arange(length), a)[: 3000 - overlap]])
    pair = []
    for indices in (a, b):
        dense = np.zeros(length, np.float32)
        dense[indices] = random.standard_normal(indices.size)
        pair.append(sparse(dense))
    got = merge(scratch, *(put(scratch.machine, vector) for vector in pair), k)
    assert_same(scratch.machine, got, reference.merge(*pair, k))


def test_merge_accepts_int64_indices(scratch: Scratch) -> None:
    far = 2**31 + 5
    a = SparseVector(np.array([3, far], np.int64), np.array([1, 2], np.float32), 2**32)
    b = SparseVector(np.array([far, far + 1], np.int64), np.array([5, -1], np.float32), 2**32)
    merged = merge(scratch, put(scratch.machine, a), put(scratch.machine, b), 2)
    assert merged.indices.tolist() == [3, far]
    assert merged.values.tolist() == [1, 7]


def test_merge_keeps_nan_and_infinity_before_numbers(scratch: Scratch) -> None:
    a = SparseVector(np.array([1, 4], np.int32), np.array([np.nan, 9], np.float32), 9)
    b = SparseVector(np.array([2, 6], np.int32), np.array([-np.inf, 8], np.float32), 9)
    merged = merge(scratch, put(scratch.machine, a), put(scratch.machine, b), 3)
    assert merged.indices.tolist() == [1, 2, 4]


@settings(max_examples=40)
@given(lists(st.integers(1, 20)))
def test_sum_by_index_adds_in_list_order(scratch: Scratch, vectors: list[SparseVector]) -> None:
    got = sum_by_index(scratch, [put(scratch.machine, vector) for vector in vectors])
    assert_same(scratch.machine, got, reference.sum_by_index(vectors))


def test_sum_by_index_does_not_flush_subnormal_numbers(scratch: Scratch) -> None:
    tiny = np.finfo(np.float32).smallest_subnormal
    vectors = [sparse(np.arange(1, 200).astype(np.float32) * scale * tiny) for scale in (1, 2, -3)]
    for together in (vectors, vectors[:2]):
        got = sum_by_index(scratch, [put(scratch.machine, vector) for vector in together])
        assert_same(scratch.machine, got, reference.sum_by_index(together))


def test_merge_and_sum_of_empty_vectors_are_empty(scratch: Scratch) -> None:
    empty = put(scratch.machine, SparseVector.empty(7))
    merged = merge(scratch, empty, empty, 3)
    assert (merged.entries, merged.length) == (0, 7)
    assert sum_by_index(scratch, [empty] * 3).entries == 0


def test_merge_and_sum_each_wait_once(scratch: Scratch, random: np.random.Generator) -> None:
    machine: Any = scratch.machine
    a, b = (put(machine, sparse(random.standard_normal(900))) for _ in range(2))
    before = machine.fetched
    merge(scratch, a, b, 300)
    sum_by_index(scratch, [a, b, a])
    assert machine.fetched == before + 2
