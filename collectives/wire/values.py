"""Value codes: float32 or float64 values as bytes, and back, by name.

    exact   as they are
    bf16    bfloat16: 8 significant bits
    fp16    IEEE half: 11 significant bits for values within 2^28 of the largest
    int8    7 bits and the sign, relative to the largest of each 64 values
    int4    -7..7 times a scale, which is an eighth of the largest of each 256 values
    int3    -3..3, a quarter
    int2    -1..1, half

All but `exact` round to the nearest, to a grid that is a power of two or a few of them: the error
v - q(v) is a multiple of v's last place and not larger than v, hence exact in the values' own
dtype. No finite value overflows, and what is not finite does not become so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels import codes
from ..vector import Array


class ValueCode(NamedTuple):
    """One way to write values."""

    element_bytes: Callable[[int], int]  # (bytes of a float) -> what its elements are aligned to
    size_bytes: Callable[[int, int], int]  # (count, bytes of a float) -> bytes it takes
    pack: Callable[[Array, Array], int]  # (values, buffer) -> exponent
    unpack: Callable[[Array, int, int, Any], Array]  # (bytes, count, exponent, dtype) -> values
    exponents: Callable[[np.dtype[Any]], range]  # that values of a dtype may have


def _pack_exact(values: Array, out: Array) -> int:
    out.view(values.dtype)[:] = values
    return 0


def _unpack_exact(data: Array, count: int, exponent: int, dtype: Any) -> Array:
    return data.view(dtype)


def _rounding(name: str, element_bytes: int, size_bytes: Callable[[int], int]) -> ValueCode:
    """Return a code that rounds; its size does not depend on the dtype of the values."""
    return ValueCode(
        lambda float_bytes: element_bytes,
        lambda count, float_bytes: size_bytes(count),
        getattr(codes, f"pack_{name}"),
        getattr(codes, f"unpack_{name}"),
        lambda dtype: codes.exponent_range(name, dtype),
    )


# New codes go to the end: a code's place is its number in the header.
VALUE_CODES: Final[dict[str, ValueCode]] = {
    "exact": ValueCode(
        lambda float_bytes: float_bytes,
        lambda count, float_bytes: count * float_bytes,
        _pack_exact,
        _unpack_exact,
        lambda dtype: range(1),
    ),
    "bf16": _rounding("bf16", 2, lambda count: 2 * count),
    "fp16": _rounding("fp16", 2, lambda count: 2 * count),
    "int8": _rounding("int8", 1, codes.int8_bytes),
    "int4": _rounding("int4", 1, partial(codes.few_bits_bytes, "int4")),
    "int3": _rounding("int3", 1, partial(codes.few_bits_bytes, "int3")),
    "int2": _rounding("int2", 1, partial(codes.few_bits_bytes, "int2")),
}

# By the bits of a value; of the two codes of 16 bits, the one with float32's range.
CODES_OF_BITS: Final = {2: "int2", 3: "int3", 4: "int4", 8: "int8", 16: "bf16", 32: "exact"}

# The codes for a choice by speed. Fewer bits delay more of a gradient, at a cost in convergence
# that is not measured for every task, so other codes are used only on request.
CHOSEN_FROM: Final = ("exact", "bf16", "fp16", "int8")
