"""SparseVector: operations, and the check of its validity."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from collectives import SparseVector
from collectives.vector import check, index_dtype


class Foreign(np.ndarray):
    """An array of another library, to those who ask where it comes from."""

    __module__ = "library.core"


def entries(indices: list[int], values: list[float], length: int) -> SparseVector:
    return SparseVector(np.array(indices, np.int32), np.array(values, np.float32), length)


def test_to_dense_has_every_entry_and_zeros_elsewhere() -> None:
    dense = entries([1, 3], [2.5, -1.0], 5).to_dense()
    assert dense.tolist() == [0, 2.5, 0, -1, 0]
    assert dense.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_from_dense_and_to_dense_round_trip(dtype: type) -> None:
    dense = np.array([0, -0.0, 1, -1, 5e-324, 0, 1e38], dtype)
    vector = check(SparseVector.from_dense(dense))
    assert vector.indices.tolist() == np.flatnonzero(dense).tolist()
    assert vector.to_dense().tolist() == dense.tolist()
    assert vector.values.dtype == dtype
    assert vector.indices.dtype == np.int32


def test_vector_of_zeros_has_no_entries() -> None:
    vector = check(SparseVector.empty(4, np.float64))
    assert vector.entries == 0
    assert vector.to_dense().tolist() == [0, 0, 0, 0]
    assert vector.to_dense().dtype == np.float64
    assert check(SparseVector.from_dense(np.zeros(4, np.float32))).entries == 0


def test_where_keeps_the_entries_whose_mask_is_true() -> None:
    vector = entries([1, 3, 4], [1, 2, 3], 5)
    kept = vector.where(np.array([True, False, True]))
    assert kept.indices.tolist() == [1, 4]
    assert kept.values.tolist() == [1, 3]
    assert kept.length == 5
    assert vector.entries == 3


def test_host_vector_stays_on_the_host() -> None:
    vector = entries([1, 3], [1, 2], 5)
    assert vector.on_host() is vector
    assert vector.beside(np.empty(0)).values is vector.values
    assert SparseVector.empty(5, np.float64, like=vector.values).values.dtype == np.float64


def test_arrays_of_another_library_use_its_own_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ModuleType("library")
    library.zeros = lambda size, dtype: np.zeros(size, dtype).view(Foreign)
    library.flatnonzero = lambda array: np.flatnonzero(array).view(Foreign)
    library.asarray = lambda array: np.asarray(array).view(Foreign)
    monkeypatch.setitem(sys.modules, "library", library)
    dense = np.array([0, 2, 0, -1], np.float32).view(Foreign)
    vector = check(SparseVector.from_dense(dense))
    assert type(vector.indices) is type(vector.to_dense()) is Foreign
    assert vector.to_dense().tolist() == [0, 2, 0, -1]
    assert type(entries([1], [1], 4).beside(dense).values) is Foreign


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, np.int32), (2**31 - 1, np.int32), (2**31, np.int64), (2**40, np.int64)],
)
def test_index_dtype_is_the_narrowest_for_the_length(length: int, dtype: type) -> None:
    assert index_dtype(length) == dtype
    assert SparseVector.empty(length).indices.dtype == dtype
    last = np.array([length - 1], dtype)
    assert check(SparseVector(last, np.ones(1, np.float32), length)).indices[0] == length - 1


@pytest.mark.parametrize(
    ("vector", "text"),
    [
        (
            SparseVector(np.array([1], np.int32), np.array([1], np.float16), 5),
            "values must be float32 or float64, got float16",
        ),
        (
            SparseVector(np.array([1], np.int32), np.array([1]), 5),
            "values must be float32 or float64, got int64",
        ),
        (
            SparseVector(np.array([1], np.int32), np.array([1], ">f4"), 5),
            "values must be float32 or float64, got >f4",
        ),
        (
            entries([1, 2], [1], 5),
            "equally long, got shapes (2,) and (1,)",
        ),
        (
            SparseVector(np.ones((1, 1), np.int32), np.ones((1, 1), np.float32), 5),
            "one-dimensional and equally long, got shapes (1, 1) and (1, 1)",
        ),
        (
            SparseVector(np.array([1]), np.ones(1, np.float32), 5),
            "indices of a vector of 5 elements must be int32, got int64",
        ),
        (
            SparseVector(np.array([1], np.int32), np.ones(1, np.float32), 2**31),
            "indices of a vector of 2147483648 elements must be int64, got int32",
        ),
        (entries([-1, 2], [1, 1], 5), "indices must lie in 0..4, got -1..2"),
        (entries([2, 5], [1, 1], 5), "indices must lie in 0..4, got 2..5"),
        (
            entries([0, 3, 1, 4], [1, 1, 1, 1], 5),
            "indices must be strictly increasing, got 3 before 1",
        ),
        (entries([0, 3, 3], [1, 1, 1], 5), "indices must be strictly increasing, got 3 before 3"),
        # Out of range in the middle only: out of order, too.
        (entries([0, 9, 4], [1, 1, 1], 5), "indices must be strictly increasing, got 9 before 4"),
    ],
)
def test_check_refuses_invalid_vectors_with_the_reason(vector: SparseVector, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        check(vector)


def test_check_refuses_indices_and_values_of_different_libraries() -> None:
    values = np.ones(1, np.float32)
    with pytest.raises(TypeError, match=r"NumPy's or CuPy's, got list"):
        check(SparseVector([1], values, 5))  # type: ignore[arg-type]
    on_gpu = SimpleNamespace(__cuda_array_interface__={})
    with pytest.raises(ValueError, match=r"both be NumPy's, or both CuPy's"):
        check(SparseVector(on_gpu, values, 5))  # type: ignore[arg-type]


# ---- parts of a vector


def of(pairs: dict[int, float], length: int) -> SparseVector:
    return entries(list(pairs), list(pairs.values()), length)


@pytest.mark.parametrize(
    ("first", "end", "inside"),
    [
        (0, 9, [1, 4, 8]),
        (1, 4, [1]),
        (1, 5, [1, 4]),
        (2, 4, []),
        (5, 5, []),
        (8, 9, [8]),
        (0, 0, []),
    ],
)
def test_index_range_returns_the_entries_between_two_bounds(
    first: int, end: int, inside: list[int]
) -> None:
    vector = of({1: 1.0, 4: 2.0, 8: 3.0}, 9)
    part = vector.index_range(first, end)
    assert part.indices.tolist() == inside
    assert (part.length, part.values.dtype) == (9, vector.values.dtype)


@pytest.mark.parametrize("length", [2**31 - 1, 2**31, 2**40])
def test_index_range_includes_the_last_entry_of_long_vectors(length: int) -> None:
    indices = np.array([0, length - 1], index_dtype(length))
    vector = SparseVector(indices, np.ones(2, np.float32), length)
    assert vector.index_range(1, length).indices.tolist() == [length - 1]
    assert vector.index_range(0, length - 1).indices.tolist() == [0]


def test_minus_returns_the_nonzero_differences() -> None:
    ours, theirs = of({1: 1.5, 4: 2.0, 8: 3.0}, 9), of({1: 1.0, 4: 2.0, 8: 4.0}, 9)
    difference = ours.minus(theirs)
    assert difference.indices.tolist() == [1, 8]
    assert difference.values.tolist() == [0.5, -1.0]


@pytest.mark.parametrize("length", [20, 2**31])
def test_embed_shifts_indices_into_a_longer_vector(length: int) -> None:
    longer = of({0: 1.0, 4: 2.0}, 5).embed(10, length)
    assert longer.indices.tolist() == [10, 14]
    assert check(longer).length == length


def test_take_returns_the_entries_at_positions() -> None:
    vector = of({1: 1.0, 4: 2.0, 8: 3.0}, 9)
    assert vector.take(slice(0, None, 2)).indices.tolist() == [1, 8]
    assert vector.take(slice(0)).entries == 0
