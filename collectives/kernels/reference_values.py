"""Value codes in NumPy: the specification of their twins, and the fallback without them.

All values of a message are scaled by one power of two, its exponent, into the code's range. That is
exact, so a code rounds only once. The rounding error is again a float of the value's dtype.

bf16, fp16: values as 16-bit floats, bfloat16 or IEEE half.

    value = 16-bit float * 2^exponent       both codes round to the nearest, ties to even

Finite values stay finite: if the nearest 16-bit float would decode as infinity, the one below is
taken. Infinities stay, and every NaN becomes the same one.

int8: values as 8-bit integers, with a power of two for each block of 64.

    +------------------+---------------+
    | steps uint8 [b]  | int8 [k]      |     value = integer * 2^(exponent - step of its block)
    +------------------+---------------+

The largest integer of a block is 64..127, unless its values are 2^248 times smaller than the
message's largest. Step 255: the block has a NaN or an infinity, and all of it decodes as NaN.

int4, int3, int2: values as small integers, with a scale for each block of 256 (int2: of 240).

    +-------------------+----------------------+
    | scales uint8 [b]  | integers             |     value = integer * scale of its block
    +-------------------+----------------------+
    scale    (15 - s % 8) * 2^(exponent - s // 8) for a byte s; 255: the block has a NaN or an
             infinity, and all of it decodes as NaN
    integer  int4, int3: two's complement of 4 or 3 bits, -7..7 or -3..3, the first value's lowest
             bit first. int2: -1..1, five in a byte as the digits 0..2 of a number of base 3, the
             first value's lowest; the last byte's missing values are 0

A block's scale is its largest |value| / 2^(bits - 1), truncated to 4 significant bits, unless it is
2^31 times smaller than the message's largest. Values near the largest are clipped to the largest
integer. That loses less than a scale without clipping: with 3 bits 5 % of the sum of squares of
normally distributed values, where a scale of the largest / 3 loses 8 %. For Laplace's distribution
it is 10 % and 15 %, for the largest twentieth of the values 3 % and 4 %.

As a scale has few bits, the rounding error is exact: it is a multiple of the value's last place,
and not larger than the value.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from ..vector import Array
from .narrow import round_to_bfloat16, widen_bfloat16
from .reference_indices import in_rows

# The exponent to which a message's largest |value| is scaled before rounding.
TOP: Final = {
    "bf16": 100,  # leaves room down to 2^-133, and both factors of the scale are float32
    "fp16": 14,  # at 15 rounding up could overflow; leaves room down to 2^-24
    "int8": 6,  # 64..127
    # So that a scale, the largest / 2^(bits - 1), is a 4-bit integer, 8..15.
    "int4": 6,
    "int3": 5,
    "int2": 4,
}
_NAN: Final = {"bf16": 0x7FC0, "fp16": 0x7E00}
# The bits of 2^(TOP + 1), to which values just below round up.
_BEYOND: Final = {"bf16": (TOP["bf16"] + 1 + 127) << 7, "fp16": (TOP["fp16"] + 1 + 15) << 10}
BLOCK: Final = {"int8": 64, "int4": 256, "int3": 256, "int2": 240}  # values that share a scale
BITS: Final = {"int4": 4, "int3": 3, "int2": 2}
_SMALLEST: Final = 254  # byte of the finest scale
_NOT_FINITE: Final = 255  # byte of a block that decodes as NaN
_GROUP: Final = 8  # values that fill whole bytes
_DIGITS: Final = 3 ** np.arange(5)  # the weights of five integers -1..1 in a byte


def value_bytes(count: int, code: str) -> int:
    """Return how many bytes the code of `count` values takes."""
    if code in _NAN:
        return 2 * count
    integers = -(-count // _DIGITS.size) if code == "int2" else -(-count * _bits(code) // 8)
    return -(-count // BLOCK[code]) + integers


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
    # Of the codes of few bits, the lowest applies to scale and integer together.
    return range(lowest - (0 if code in BITS else TOP[code]), highest - TOP[code] + 1)


def exponents(magnitudes: Array) -> Array:
    """Return e with 2^e <= m < 2^(e+1), int [n]; 0 for a zero.

    For NaN and infinity it is one more than the largest of finite numbers.
    magnitudes: float32 or float64 [n], not negative.
    """
    info = np.finfo(magnitudes.dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found = np.frexp(magnitudes)[1] - 1
    # frexp's exponent of NaN and infinity is unspecified, but twins must agree on one.
    found = np.where(np.isfinite(magnitudes), found, info.maxexp)
    return np.where(magnitudes == 0, 0, found)


def common_exponent(code: str, values: Array) -> int:
    """Return the exponent by which all values of a message are scaled."""
    if not values.size:
        return -TOP[code]
    largest = np.abs(values).max(keepdims=True)
    return max(int(exponents(largest)[0]) - TOP[code], exponent_range(code, values.dtype).start)


def scaled(values: Array, exponent: Any) -> Array:
    """Return values * 2^exponent (a number, or int [n]) in the values' dtype.

    In two steps, as 2^exponent itself may be out of the dtype's range.
    """
    first, second = scale_factors(exponent, values.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # a sender may send any values
        product: Array = values * first * second
    return product


def scale_factors(exponent: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return two numbers of the dtype whose product is 2^exponent (a number, or int [n])."""
    half = exponent >> 1
    one = dtype.type(1)
    return np.ldexp(one, half), np.ldexp(one, exponent - half)


# ---- 16-bit floats


def rounds_to_infinity(code: str, exponent: int, dtype: np.dtype[Any]) -> int | None:
    """Return the bits, without the sign, that rounding up may give but decode as infinity."""
    return _BEYOND[code] if exponent + TOP[code] == np.finfo(dtype).maxexp - 1 else None


def _pack_floats(code: str, values: Array, exponent: int, out: Array) -> None:
    in_range = scaled(values, -exponent)
    if code == "bf16":
        rounded = round_to_bfloat16(in_range.astype(np.float32))
    else:
        rounded = in_range.astype(np.float16).view(np.uint16)
    rounded[np.isnan(values)] = _NAN[code]
    infinite_bits = rounds_to_infinity(code, exponent, values.dtype)
    if infinite_bits is not None:
        rounded -= rounded & 0x7FFF == infinite_bits
    out.view(np.uint16)[:] = rounded


# ---- integers


def _bits(code: str) -> int:
    return BITS.get(code, 8)


def _pack_integers(code: str, values: Array, exponent: int, out: Array) -> None:
    blocks = in_rows(values, BLOCK[code])
    largest = np.abs(blocks).max(axis=1)
    scales = _scale_bytes(code, largest, exponent)
    places, shifts = _places_and_shifts(code, scales)
    integers = np.rint(scaled(blocks, (shifts - exponent)[:, None]) / places[:, None])
    # With 8 bits, for example, 127.5 rounds to 128, which does not fit a byte.
    most = (1 << _bits(code) - 1) - 1
    integers = integers.clip(-most, most)
    finite = np.isfinite(largest)
    integers[~finite] = 0  # the block's scale marks it
    scales[~finite] = _NOT_FINITE
    out[: scales.size] = scales
    out[scales.size :] = _packed(_bits(code), integers.ravel()[: values.size])


def _unpack_integers(
    code: str, data: Array, count: int, exponent: int, dtype: np.dtype[Any]
) -> Array:
    scales = data[: -(-count // BLOCK[code])].astype(np.int64)
    integers = _unpacked(_bits(code), data[scales.size :], count)
    places, shifts = _places_and_shifts(code, scales)
    blocks = in_rows(integers.astype(dtype), BLOCK[code]) * places[:, None].astype(dtype)
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
        # No scale is finer than the dtype's smallest number.
        most = exponent - exponent_range(code, largest.dtype).start
        places = np.where(shifts > most, 8, places)
        scales = np.minimum(8 * np.minimum(shifts, most) + 15 - places, _SMALLEST)
    return np.where(largest == 0, 0, scales)


def _places_and_shifts(code: str, scales: Array) -> tuple[Array, Array]:
    """Decode scale bytes into places and shifts, int64 [b] each.

    The scale is places * 2^(exponent - shift). `places` is 8..15, its four significant bits; 1 for
    int8, whose scales are powers of two.
    """
    if code == "int8":
        return np.ones_like(scales), scales
    return 15 - (scales & 7), scales >> 3


def _packed(bits: int, integers: Array) -> Array:
    """Return the integers' bytes, uint8."""
    if bits == 8:
        return integers.astype(np.int8).view(np.uint8)
    if bits == BITS["int2"]:
        return ((in_rows(integers, _DIGITS.size) + 1) @ _DIGITS).astype(np.uint8)
    fields = integers.astype(np.int64) & (1 << bits) - 1
    groups = in_rows(fields, _GROUP) << bits * np.arange(_GROUP)
    # Eight integers of at most 4 bits fit 32 bits.
    words = groups.sum(axis=1).astype("<u4").view(np.uint8).reshape(-1, 4)
    return words[:, :bits].ravel()[: -(-integers.size * bits // 8)]


def _unpacked(bits: int, data: Array, count: int) -> Array:
    """Return the integers, int8 or int64 [count]."""
    if bits == 8:
        return data.view(np.int8)
    if bits == BITS["int2"]:
        return (data[:, None] // _DIGITS % 3).ravel()[:count] - 1
    words = np.zeros((-(-count // _GROUP), 4), np.uint8)
    words[:, :bits] = in_rows(data, bits)
    groups = words.view("<u4").astype(np.int64) >> bits * np.arange(_GROUP) & (1 << bits) - 1
    half = 1 << bits - 1
    # Extend the sign of a two's complement of few bits.
    return (groups.ravel()[:count] ^ half) - half
