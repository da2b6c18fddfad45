"""floats: values as 16-bit floats, bfloat16 or IEEE half, scaled by one power of two a message.

    value = 16-bit float * 2^exponent       both codes round to the nearest, ties to even

Finite values stay finite: where the nearest one would decode as infinity, it is the one below.
Others stay what they are, and every NaN becomes the same one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...vector import Array
from .scale import TOP, common_exponent, scaled

_BF16_NAN: Final = 0x7FC0
_FP16_NAN: Final = 0x7E00
# The bits of 2^(TOP + 1), to which values just below it round up.
_BEYOND: Final = {"bf16": (TOP["bf16"] + 1 + 127) << 7, "fp16": (TOP["fp16"] + 1 + 15) << 10}


def rounds_to_infinity(code: str, exponent: int, dtype: np.dtype[Any]) -> int | None:
    """Return the bits, without the sign, that decode as infinity by having rounded up, if any."""
    return _BEYOND[code] if exponent + TOP[code] == np.finfo(dtype).maxexp - 1 else None


def _finite(code: str, rounded: Array, exponent: int, dtype: np.dtype[Any]) -> Array:
    """Return the bits, uint16 [k], but for those that decode as infinity by having rounded up."""
    beyond = rounds_to_infinity(code, exponent, dtype)
    if beyond is not None:
        rounded -= rounded & 0x7FFF == beyond
    return rounded


def pack_bf16(values: Array, out: Array) -> int:
    """Write the values, float32 or float64 [k], into uint8 [2 k]; return the exponent."""
    exponent = common_exponent("bf16", values)
    bits = scaled(values, -exponent).astype(np.float32).view(np.uint32)
    # Half of the last place less one, and the last place itself: ties go to the even neighbour.
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = _BF16_NAN
    out.view(np.uint16)[:] = _finite("bf16", rounded, exponent, values.dtype)
    return exponent


def unpack_bf16(data: Array, count: int, exponent: int, dtype: np.dtype[Any]) -> Array:
    """Return the values, of the dtype, [count]."""
    bits = data.view(np.uint16).astype(np.uint32) << 16
    return scaled(_cast(bits.view(np.float32), dtype), exponent)


def pack_fp16(values: Array, out: Array) -> int:
    """Write the values, float32 or float64 [k], into uint8 [2 k]; return the exponent."""
    exponent = common_exponent("fp16", values)
    rounded = scaled(values, -exponent).astype(np.float16).view(np.uint16)
    rounded[np.isnan(values)] = _FP16_NAN
    out.view(np.uint16)[:] = _finite("fp16", rounded, exponent, values.dtype)
    return exponent


def unpack_fp16(data: Array, count: int, exponent: int, dtype: np.dtype[Any]) -> Array:
    """Return the values, of the dtype, [count]."""
    return scaled(_cast(data.view(np.float16), dtype), exponent)


def _cast(narrow: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(invalid="ignore"):  # a sender may send signalling NaNs
        return narrow.astype(dtype)
