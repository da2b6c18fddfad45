"""scale: powers of two that bring values into the range of a narrower type, and rows of values.

Multiplying by a power of two is exact, so a code rounds in one place only; and the difference of a
value and its rounding to a grid of powers of two is a float of the value's type.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from ...vector import Array

# The exponent that the largest |value| of a message gets before it is rounded.
TOP: Final = {
    "bf16": 100,  # down to 2^-133, and each half of the scale is a float32
    "fp16": 14,  # at 15 rounding up could overflow; down to 2^-24
    "int8": 6,  # 64..127
    # A scale is the largest / 2^(bits - 1), an integer of four bits: 8..15.
    "int4": 6,
    "int3": 5,
    "int2": 4,
}
_FINEST: Final = ("int4", "int3", "int2")  # whose integers are multiplied with the scale's


@functools.cache
def exponent_range(code: str, dtype: np.dtype[Any]) -> range:
    """Return the scales that values of a dtype may have."""
    info = np.finfo(dtype)
    lowest, highest = int(info.minexp) - int(info.nmant), int(info.maxexp)
    return range(lowest - (0 if code in _FINEST else TOP[code]), highest - TOP[code] + 1)


def in_rows(array: Array, width: int) -> Array:
    """Return the elements in rows of `width`, with zeros behind the last."""
    rows = np.zeros((-(-array.size // width), width), array.dtype)
    rows.ravel()[: array.size] = array
    return rows


def exponents(magnitudes: Array) -> Array:
    """Return e with 2^e <= m < 2^(e+1), int [n]; 0 for a zero.

    For NaN and infinity it is one more than the largest of finite numbers.
    magnitudes: float32 or float64 [n], none below 0.
    """
    info = np.finfo(magnitudes.dtype)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        found = np.frexp(magnitudes)[1] - 1
    # NumPy does not say which exponent NaN and infinity have; the twins must agree on one.
    found = np.where(np.isfinite(magnitudes), found, info.maxexp)
    return np.where(magnitudes == 0, 0, found)


def common_exponent(code: str, values: Array) -> int:
    """Return the exponent of the scale that all values of a message share."""
    if not values.size:
        return exponent_of_nothing(code)
    largest = np.abs(values).max(keepdims=True)
    return max(int(exponents(largest)[0]) - TOP[code], exponent_range(code, values.dtype).start)


def exponent_of_nothing(code: str) -> int:
    """Return the exponent of a message of zeros."""
    return -TOP[code]


def scaled(values: Array, exponent: Any) -> Array:
    """Return values * 2^exponent (a number, or int [n]) in the values' dtype.

    In two steps: 2^exponent itself may be no number of this dtype.
    """
    first, second = scale_factors(exponent, values.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # of what others send
        product: Array = values * first * second
    return product


def scale_factors(exponent: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return two numbers of the dtype whose product is 2^exponent (a number, or int [n])."""
    half = exponent >> 1
    one = dtype.type(1)
    return np.ldexp(one, half), np.ldexp(one, exponent - half)
