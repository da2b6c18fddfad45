"""int4, int3, int2: values as integers of 4, 3 or 2 bits, with a scale for each block of 256.

    +-------------------+----------------------+
    | scales uint8 [b]  | ceil(bits k / 8)     |     value = integer * scale of its block
    +-------------------+----------------------+
    scale    (15 - s % 8) * 2^(exponent - s // 8) for a byte s; 255: the block holds a NaN or an
             infinity, and all of it decodes as NaN
    integer  -3..3 of 3 bits, say: two's complement, the lowest value's lowest bit first

exponent is the message's. A block's scale is its largest |value| / 2^(bits - 1), cut to 4
significant bits, unless it is 2^31 times smaller than the message's largest. With it values near
the largest are cut to the last integer. That loses less than a scale which spares them: with 3
bits 5 % of the sum of squares of normal values, where the largest / 3 loses 8 %; of Laplace's 10 %
and 15 %; of the largest twentieth of them 3 % and 4 %.

A scale of few bits keeps the rounding error exact: it is a multiple of the value's last place, and
not larger than the value.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from ...vector import Array
from .scale import TOP, common_exponent, exponent_range, exponents, in_rows, scaled

BLOCK: Final = 256
BITS: Final = {"int4": 4, "int3": 3, "int2": 2}
_SMALLEST: Final = 254
_NOT_FINITE: Final = 255
_GROUP: Final = 8  # values that fill whole bytes


def few_bits_bytes(code: str, count: int) -> int:
    """Return how many bytes the code of `count` values takes."""
    return -(-count // BLOCK) + -(-count * BITS[code] // 8)


def _pack(code: str, values: Array, out: Array) -> int:
    """Write values, float32 or float64 [k], into uint8 [few_bits_bytes(code, k)].

    Returns their exponent.
    """
    exponent = common_exponent(code, values)
    blocks = in_rows(values, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    scales = _scale_bytes(code, largest, exponent)
    places, shifts = _places_and_shifts(scales)
    integers = np.rint(scaled(blocks, (shifts - exponent)[:, None]) / places[:, None])
    most = (1 << BITS[code] - 1) - 1
    integers = integers.clip(-most, most)
    finite = np.isfinite(largest)
    # A NaN has no integer: the block's scale marks it.
    integers[~finite] = 0
    scales[~finite] = _NOT_FINITE
    out[: scales.size] = scales
    out[scales.size :] = _packed(BITS[code], integers.ravel()[: values.size].astype(np.int64))
    return exponent


def _unpack(code: str, data: Array, count: int, exponent: int, dtype: np.dtype[Any]) -> Array:
    """Return the values, of the dtype, [count]."""
    scales = data[: -(-count // BLOCK)].astype(np.int64)
    integers = _unpacked(BITS[code], data[scales.size :], count)
    places, shifts = _places_and_shifts(scales)
    blocks = in_rows(integers.astype(dtype), BLOCK) * places[:, None].astype(dtype)
    values = scaled(blocks, (exponent - shifts)[:, None])
    values[scales == _NOT_FINITE] = np.nan
    unpacked: Array = values.ravel()[:count]
    return unpacked


def _scale_bytes(code: str, largest: Array, exponent: int) -> Array:
    """Return the byte s that codes each block's scale, int64 [b]; 0 for a block of zeros.

    largest: the largest |value| of each block.
    """
    found = exponents(largest)
    with np.errstate(invalid="ignore"):
        places = np.floor(scaled(largest, 3 - found))  # 8..15: four significant bits
    places = np.where(np.isfinite(places), places, 8).astype(np.int64)
    shifts = exponent - (found - TOP[code])
    # No scale is finer than the smallest number of this dtype.
    most = exponent - exponent_range(code, largest.dtype).start
    places = np.where(shifts > most, 8, places)
    scales = np.minimum(8 * np.minimum(shifts, most) + 15 - places, _SMALLEST)
    return np.where(largest == 0, 0, scales)


def _places_and_shifts(scales: Array) -> tuple[Array, Array]:
    """Decode scale bytes into places and shifts, int64 [b] each.

    The scale is places * 2^(exponent - shift): 8..15 are its four significant bits.
    """
    return 15 - (scales & 7), scales >> 3


def _packed(bits: int, integers: Array) -> Array:
    """Return the integers' bits, uint8 [ceil(bits k / 8)]."""
    groups = in_rows(integers & (1 << bits) - 1, _GROUP) << bits * np.arange(_GROUP)
    # A group fits 32 bits as long as an integer has at most 4.
    words = groups.sum(axis=1).astype("<u4").view(np.uint8).reshape(-1, 4)
    packed: Array = words[:, :bits].ravel()[: -(-integers.size * bits // 8)]
    return packed


def _unpacked(bits: int, data: Array, count: int) -> Array:
    """Return the integers, int64 [count]."""
    words = np.zeros((-(-count // _GROUP), 4), np.uint8)
    words[:, :bits] = in_rows(data, bits)
    groups = words.view("<u4").astype(np.int64) >> bits * np.arange(_GROUP) & (1 << bits) - 1
    half = 1 << bits - 1
    # Two's complement of a few bits, extended to a whole integer.
    return (groups.ravel()[:count] ^ half) - half


pack_int4, pack_int3, pack_int2 = (partial(_pack, code) for code in BITS)
unpack_int4, unpack_int3, unpack_int2 = (partial(_unpack, code) for code in BITS)
