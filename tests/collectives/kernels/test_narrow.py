"""16-bit floats are widened exactly, and rounded to the nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives.kernels.narrow import (
    BFLOAT16,
    combine,
    is_narrow,
    multiply,
    narrow,
    widen,
)

EVERYTHING = np.arange(1 << 16, dtype=np.uint16)
BLOCK = 1 << 15  # that are rounded at a time


def test_every_bfloat16_round_trips_through_float32() -> None:
    words = EVERYTHING.view(BFLOAT16)
    wide = widen(words)
    assert wide.dtype == np.float32
    assert wide[0x3F80] == 1.0
    assert wide[0xC020] == -2.5
    numbers = ~np.isnan(wide)
    back = narrow(wide, BFLOAT16)
    assert back.dtype == BFLOAT16
    assert back[numbers].tobytes() == words[numbers].tobytes()
    assert np.isnan(widen(back)[~numbers]).all()


@pytest.mark.parametrize("length", [0, 1, BLOCK, BLOCK + 1, 200_000])
def test_float32_rounds_to_bfloat16_as_in_torch(length: int) -> None:
    bits = np.random.default_rng(length).integers(0, 1 << 32, length, np.uint32)
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000  # halfway between two
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(widen(narrow(values, BFLOAT16)), expected)


def test_narrow_keeps_nan_and_infinity() -> None:
    # A carry would turn the first into zero, and the second into infinity.
    lost = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(widen(narrow(lost, BFLOAT16))).all()
    infinite = np.array([np.inf, -np.inf, np.finfo(np.float32).max], np.float32)
    assert widen(narrow(infinite, BFLOAT16)).tolist() == [np.inf, -np.inf, np.inf]


def test_float16_widens_and_rounds_as_in_numpy() -> None:
    wide = widen(np.array([1.5, 65504.0], np.float16))
    assert (wide.dtype, wide.tolist()) == (np.float32, [1.5, 65504.0])
    assert narrow(wide, np.dtype(np.float16)).tolist() == [1.5, 65504.0]


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=["float16", "bfloat16"])
def test_16_bit_reductions_are_computed_in_float32_and_rounded_once(dtype: np.dtype) -> None:
    words = np.random.default_rng(5).permutation(EVERYTHING).view(dtype)
    others = EVERYTHING.view(dtype)
    operations = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}
    with np.errstate(all="ignore"):
        for reduction, operation in operations.items():
            expected = narrow(operation(widen(words), widen(others)), dtype)
            own = words.copy()
            combine(own, others, reduction)
            np.testing.assert_array_equal(widen(own), widen(expected), reduction)
        for factor in (1 / 3, 0.25, 1e-9):
            expected = narrow(widen(words) * np.float32(factor), dtype)
            own = words.copy()
            multiply(own, factor)
            np.testing.assert_array_equal(widen(own), widen(expected), str(factor))
    part = others[1::2].copy()
    combine(part[3:5], others[:2], "sum")  # in place, at any element
    assert part[:3].tobytes() == others[1:7:2].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint16])
def test_other_dtypes_are_not_converted(dtype: type) -> None:
    array = np.ones(3, dtype)
    assert widen(array) is array
    assert narrow(array, array.dtype) is array
    assert not is_narrow(array.dtype)


def test_bfloat16_arrays_refuse_numpy_arithmetic() -> None:
    with pytest.raises(TypeError):
        np.add(np.zeros(2, BFLOAT16), np.zeros(2, BFLOAT16))
