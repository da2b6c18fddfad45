"""Value codes in NumPy: the reference for their twins, and the fallback without them.

A message has one power of two, its exponent, that brings its values into a code's range.
Multiplying by a power of two is exact, so a code rounds in one place only; and the difference of a
value and its rounding to a grid of powers of two is a float of the value's type.

bf16, fp16: values as 16-bit floats, bfloat16 or IEEE half.

    value = 16-bit float * 2^exponent       both codes round to the nearest, ties to even

Finite values stay finite: where the nearest one would decode as infinity, it is the one below.
Others stay what they are, and every NaN becomes the same one.

int8: values as 8-bit integers, with a power of two for each block of 64.

    +------------------+---------------+
    | steps uint8 [b]  | int8 [k]      |     value = integer * 2^(exponent - step of its block)
    +------------------+---------------+

The integers of a block reach 64..127, unless its values are 2^248 times smaller than the message's
largest. Step 255: the block holds a NaN or an infinity, and all of it decodes as NaN.

int4, int3, int2: values as integers of 4, 3 or 2 bits, with a scale for each block of 256.

    +-------------------+----------------------+
    | scales uint8 [b]  | ceil(bits k / 8)     |     value = integer * scale of its block
    +-------------------+----------------------+
    scale    (15 - s % 8) * 2^(exponent - s // 8) for a byte s; 255: the block holds a NaN or an
             infinity, and all of it decodes as NaN
    integer  -3..3 of 3 bits, say: two's complement, the lowest value's lowest bit first

A block's scale is its largest |value| / 2^(bits - 1), cut to 4 significant bits, unless it is 2^31
times smaller than the message's largest. With it values near the largest are cut to the last
integer. That loses less than a scale which spares them: with 3 bits 5 % of the sum of squares of
normal values, where the largest / 3 loses 8 %; of Laplace's 10 % and 15 %; of the largest twentieth
of them 3 % and 4 %.

A scale of few bits keeps the rounding error exact: it is a multiple of the value's last place, and
not larger than the value.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from ..vector import Array
from .narrow import round_to_bfloat16, widen_bfloat16
from .reference_indices import in_rows

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
_NAN: Final = {"bf16": 0x7FC0, "fp16": 0x7E00}
# The bits of 2^(TOP + 1), to which values just below it round up.
_BEYOND: Final = {"bf16": (TOP["bf16"] + 1 + 127) << 7, "fp16": (TOP["fp16"] + 1 + 15) << 10}
BLOCK: Final = 256  # values of few bits that share a scale
_INT8_BLOCK: Final = 64
BITS: Final = {"int4": 4, "int3": 3, "int2": 2}
_SMALLEST: Final = 254
_NOT_FINITE: Final = 255
_GROUP: Final = 8  # values that fill whole bytes


def value_bytes(count: int, code: str) -> int:
    """Return how many bytes the code of `count` values takes."""
    if code in _NAN:
        return 2 * count
    return -(-count // _block(code)) + -(-count * _bits(code) // 8)


def pack_values(values: Array, out: Array, code: str) -> int:
    """Write values, float32 or float64 [k], into their bytes, uint8; return their exponent."""
    exponent = common_exponent(code, values)
    pack = _pack_floats if code in _NAN else _pack_integers
    pack(code, values, exponent, out)
    return exponent


def unpack_values(data: Array, count: int, exponent: int, dtype: np.dtype[Any], code: str) -> Array:
    """Return the values, of the dtype, [count]."""
    if code not in _NAN:
        return _unpack_integers(code, data, count, exponent, dtype)
    narrow = widen_bfloat16(data.view(np.uint16)) if code == "bf16" else data.view(np.float16)
    with np.errstate(invalid="ignore"):  # a sender may send signalling NaNs
        values = narrow.astype(dtype)
    return scaled(values, exponent)


# ---- powers of two


@functools.cache
def exponent_range(code: str, dtype: np.dtype[Any]) -> range:
    """Return the exponents that values of a dtype may have."""
    info = np.finfo(dtype)
    lowest, highest = int(info.minexp) - int(info.nmant), int(info.maxexp)
    # Integers of few bits are multiplied with the scale's.
    return range(lowest - (0 if code in BITS else TOP[code]), highest - TOP[code] + 1)


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
        return -TOP[code]
    largest = np.abs(values).max(keepdims=True)
    return max(int(exponents(largest)[0]) - TOP[code], exponent_range(code, values.dtype).start)


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


# ---- 16-bit floats


def rounds_to_infinity(code: str, exponent: int, dtype: np.dtype[Any]) -> int | None:
    """Return the bits, without the sign, that decode as infinity by having rounded up, if any."""
    return _BEYOND[code] if exponent + TOP[code] == np.finfo(dtype).maxexp - 1 else None


def _pack_floats(code: str, values: Array, exponent: int, out: Array) -> None:
    brought = scaled(values, -exponent)
    if code == "bf16":
        rounded = round_to_bfloat16(brought.astype(np.float32))
    else:
        rounded = brought.astype(np.float16).view(np.uint16)
    rounded[np.isnan(values)] = _NAN[code]
    beyond = rounds_to_infinity(code, exponent, values.dtype)
    if beyond is not None:
        rounded -= rounded & 0x7FFF == beyond
    out.view(np.uint16)[:] = rounded


# ---- integers


def _block(code: str) -> int:
    return BLOCK if code in BITS else _INT8_BLOCK


def _bits(code: str) -> int:
    return BITS.get(code, 8)


def _pack_integers(code: str, values: Array, exponent: int, out: Array) -> None:
    blocks = in_rows(values, _block(code))
    largest = np.abs(blocks).max(axis=1)
    scales = _scale_bytes(code, largest, exponent)
    places, shifts = _places_and_shifts(code, scales)
    integers = np.rint(scaled(blocks, (shifts - exponent)[:, None]) / places[:, None])
    # Clipped: of 8 bits, say, a value rounds to 128 from 127.5 on, which a byte does not hold.
    most = (1 << _bits(code) - 1) - 1
    integers = integers.clip(-most, most)
    finite = np.isfinite(largest)
    # A NaN has no integer: the block's scale marks it.
    integers[~finite] = 0
    scales[~finite] = _NOT_FINITE
    out[: scales.size] = scales
    out[scales.size :] = _packed(_bits(code), integers.ravel()[: values.size])


def _unpack_integers(
    code: str, data: Array, count: int, exponent: int, dtype: np.dtype[Any]
) -> Array:
    scales = data[: -(-count // _block(code))].astype(np.int64)
    integers = _unpacked(_bits(code), data[scales.size :], count)
    places, shifts = _places_and_shifts(code, scales)
    blocks = in_rows(integers.astype(dtype), _block(code)) * places[:, None].astype(dtype)
    values = scaled(blocks, (exponent - shifts)[:, None])
    values[scales == _NOT_FINITE] = np.nan
    return values.ravel()[:count]


def _scale_bytes(code: str, largest: Array, exponent: int) -> Array:
    """Return the byte that codes each block's scale, int64 [b]; 0 for a block of zeros.

    largest: the largest |value| of each block.
    """
    found = exponents(largest)
    shifts = exponent - (found - TOP[code])
    if code == "int8":
        scales = np.minimum(shifts, _SMALLEST)
    else:
        with np.errstate(invalid="ignore"):
            places = np.floor(scaled(largest, 3 - found))  # 8..15: four significant bits
        places = np.where(np.isfinite(places), places, 8).astype(np.int64)
        # No scale is finer than the smallest number of this dtype.
        most = exponent - exponent_range(code, largest.dtype).start
        places = np.where(shifts > most, 8, places)
        scales = np.minimum(8 * np.minimum(shifts, most) + 15 - places, _SMALLEST)
    return np.where(largest == 0, 0, scales)


def _places_and_shifts(code: str, scales: Array) -> tuple[Array, Array]:
    """Decode scale bytes into places and shifts, int64 [b] each.

    The scale is places * 2^(exponent - shift): 8..15 are its four significant bits, and int8 has
    powers of two alone.
    """
    if code == "int8":
        return np.ones_like(scales), scales
    return 15 - (scales & 7), scales >> 3


def _packed(bits: int, integers: Array) -> Array:
    """Return the integers' bits, uint8 [ceil(bits k / 8)]."""
    if bits == 8:
        return integers.astype(np.int8).view(np.uint8)
    fields = integers.astype(np.int64) & (1 << bits) - 1
    groups = in_rows(fields, _GROUP) << bits * np.arange(_GROUP)
    # A group fits 32 bits as long as an integer has at most 4.
    words = groups.sum(axis=1).astype("<u4").view(np.uint8).reshape(-1, 4)
    return words[:, :bits].ravel()[: -(-integers.size * bits // 8)]


def _unpacked(bits: int, data: Array, count: int) -> Array:
    """Return the integers, int8 or int64 [count]."""
    if bits == 8:
        return data.view(np.int8)
    words = np.zeros((-(-count // _GROUP), 4), np.uint8)
    words[:, :bits] = in_rows(data, bits)
    groups = words.view("<u4").astype(np.int64) >> bits * np.arange(_GROUP) & (1 << bits) - 1
    half = 1 << bits - 1
    # Two's complement of a few bits, extended to a whole integer.
    return (groups.ravel()[:count] ^ half) - half
