"""Fused arrays have the same results as separate ones, with fewer reductions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.kernels.narrow import BFLOAT16, narrow, widen
from collectives.transports import LocalTransport
from gtopk.runtime.coordinator.fusion import (
    ArrayIndex,
    Dense,
    Fuser,
    fuse_arrays,
    layout_of,
    neutral_array,
    scale,
)

DTYPES = ("float16", BFLOAT16, "float32", "float64", "int32", "int64", "uint8")


def numbers(values: list[int], dtype: object) -> np.ndarray:
    """Return an array of integers that every dtype represents exactly."""
    if dtype == BFLOAT16:
        return narrow(np.array(values, np.float32), BFLOAT16)
    return np.array(values, dtype)


def share(number: int, dtype: str, length: int, factor: float) -> ArrayIndex:
    dense = Dense(np.zeros(length, dtype), "sum", postscale=factor)
    return ArrayIndex(number, 0, layout_of(dense))


layouts = st.tuples(
    st.sampled_from(["float32", "int64"]), st.integers(0, 40), st.sampled_from([1.0, 0.5])
)


@given(st.lists(layouts), st.sampled_from([0, 1, 100, 10_000]))
def test_each_array_is_in_one_bundle_of_its_layout_up_to_the_threshold(
    arrays: list[tuple[str, int, float]], threshold: int
) -> None:
    shares = [share(number, *array) for number, array in enumerate(arrays)]
    bundles = fuse_arrays(shares, threshold, 1 << 20)
    assert sorted(s.operation for group in bundles for s in group) == list(range(len(arrays)))
    assert [group[0].operation for group in bundles] == sorted(
        group[0].operation for group in bundles
    )
    for group in bundles:
        assert len({(s.layout.dtype, s.layout.postscale) for s in group}) == 1
        assert [s.operation for s in group] == sorted(s.operation for s in group)
        sizes = [s.layout.length * np.dtype(s.layout.dtype).itemsize for s in group]
        assert len(group) == 1 or sum(sizes) <= threshold
    if threshold == 10_000:  # all fit
        assert len(bundles) == len({(dtype, factor) for dtype, _, factor in arrays})


def test_large_array_is_reduced_alone():
    large = share(1, "uint8", 5000, 1.0)
    small = [share(number, "uint8", 1, 1.0) for number in (0, 2)]
    assert fuse_arrays([small[0], large, small[1]], 1 << 30, 5000) == [
        [small[0], small[1]],
        [large],
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_fused_arrays_hold_the_scaled_sum_over_ranks(threads, dtype, count):
    def program(transport: LocalTransport) -> list[list[float]]:
        members = [
            Dense(numbers([2 + transport.rank] * length, dtype), "sum", 3.0, 0.5)
            for length in range(1, 1 + count)
        ]
        Fuser().reduce(members, layout_of(members[0]), transport, lambda phase, what: None)
        return [widen(member.array).tolist() for member in members]

    integral = np.dtype(dtype).kind in "iu"
    expected = [[3 * (2 + 3 + 4) // 2 if integral else 13.5] * n for n in range(1, 4)]
    assert threads(3, program) == [expected[:count]] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["sum", "product", "min", "max"])
def test_neutral_array_changes_no_reduction(threads, dtype, reduction):
    def program(transport: LocalTransport) -> list[float]:
        values = Dense(numbers([3, 5], dtype), reduction)
        dense = values if transport.rank == 1 else neutral_array(layout_of(values))
        transport.allreduce(dense.array, reduction)
        return widen(dense.array).tolist()

    assert threads(3, program) == [[3, 5]] * 3


def test_integers_are_scaled_in_float64_and_truncated():
    array = np.array([-5, 5, 7], np.int32)
    scale(array, 0.5)
    assert array.tolist() == [-2, 2, 3]


@pytest.mark.parametrize(
    ("value", "factor"),
    [
        (1000.0, 1.0007),  # 1.001, rounded to float16
        (60000.0, 1e-9),  # 0, rounded to float16
        (0.001, 1e6),  # infinity, rounded to float16
    ],
)
def test_float16_is_scaled_in_float32(value, factor):
    array = np.array([value], np.float16)
    expected = np.float16(np.float32(array[0]) * np.float32(factor))
    scale(array, factor)
    assert array.tolist() == [expected]
    with np.errstate(over="ignore"):
        assert np.float16(value) * np.float16(factor) != expected


def test_bfloat16_is_scaled_in_float32():
    array = numbers([256], BFLOAT16)
    scale(array, 1.01)  # 258.56, between 258 and 260
    assert widen(array).tolist() == [258.0]


def test_layout_names_bfloat16_and_differs_from_uint16():
    layout = layout_of(Dense(numbers([1, 2], BFLOAT16)))
    assert layout.describe().startswith("bfloat16 [2] sum ")
    assert layout != layout_of(Dense(np.zeros(2, np.uint16)))
    assert neutral_array(layout).array.dtype == BFLOAT16


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 2)), np.zeros(4)[::2], np.zeros(2, bool), np.zeros(2, complex)],
    ids=["matrix", "strided", "bool", "complex"],
)
def test_array_that_cannot_be_reduced_in_place_is_refused(array):
    with pytest.raises(ValueError, match="a dense array must be of integers or floats, one-dim"):
        layout_of(Dense(array))
