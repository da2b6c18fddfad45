"""Format: how indices and values are written into a message; equal on all ranks.

Index codes:

    raw      int32, or int64 from 2^31 elements on: for links that are faster than packing
    blocks   16-bit offsets in blocks of 64Ki: half the bytes, at about the cost of a copy
    packed   Rice codes of the gaps: near the entropy bound, for slow links

    whole    nothing, as every element of the vector is an entry (`algorithms.shards`)

Value codes, of float32 or float64 values:

    exact   as they are
    bf16    bfloat16: 8 significant bits
    fp16    IEEE half: 11 significant bits for values within 2^28 of the largest
    int8    7 bits and the sign, relative to the largest of each 64 values
    int4    -7..7 times a scale, which is an eighth of the largest of each 256 values
    int3    -3..3, a quarter
    int2    -1..1, half, of each 240 values; five in a byte, so that a value takes 1.6 bits

All but `exact` round to the nearest multiple of a power of two (or of a sum of a few). The error
v - q(v) is then a multiple of v's last place and not larger than v, hence exact in the values' own
dtype. Finite values stay finite, and non-finite ones stay non-finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels import in_order, pack_indices, pack_values, unpack_indices, unpack_values
from ..kernels.reference_indices import index_capacity
from ..kernels.reference_values import exponent_range, value_bytes
from ..vector import Array, all_indices, index_dtype

USUAL_INDICES: Final = "blocks"  # the default of a Compression


class IndexCode(NamedTuple):
    """One way to write indices."""

    capacity: Callable[[int, int], int]  # (count, length) -> the most bytes it takes
    pack: Callable[[Array, int, Array], int]  # (indices, length, buffer) -> bytes taken
    # (bytes, count, length) -> indices, bytes taken; ValueError for anything else
    unpack: Callable[[Array, int, int], tuple[Array, int]]


def _raw_bytes(count: int, length: int) -> int:
    return count * index_dtype(length).itemsize


def _pack_raw(indices: Array, length: int, out: Array) -> int:
    size = indices.size * indices.itemsize
    out[:size].view(indices.dtype)[:] = indices
    return size


def _unpack_raw(data: Array, count: int, length: int) -> tuple[Array, int]:
    size = _raw_bytes(count, length)
    if data.size < size:
        raise ValueError(f"{count} indices take {size} bytes, there are {data.size}")
    indices = data[:size].view(index_dtype(length))
    # Kernels rely on the order: when they write by a list, they check only its two ends.
    if not in_order(indices, length):
        raise ValueError(f"its indices must be strictly increasing, in 0..{length - 1}")
    return indices, size


def _pack_whole(indices: Array, length: int, out: Array) -> int:
    if indices.size != length:
        raise ValueError(f"all {length} elements must be entries, got {indices.size}")
    return 0


def _unpack_whole(data: Array, count: int, length: int) -> tuple[Array, int]:
    if count != length:
        raise ValueError(f"it has {count} entries and must have all {length}")
    return all_indices(length, data), 0


def _packing(name: str) -> IndexCode:
    """Return a code that the kernels implement."""
    return IndexCode(
        partial(index_capacity, code=name),
        partial(pack_indices, code=name),
        partial(unpack_indices, code=name),
    )


# The codes for sparse vectors.
INDEX_CODES: Final[dict[str, IndexCode]] = {
    "raw": IndexCode(_raw_bytes, _pack_raw, _unpack_raw),
    "blocks": _packing("blocks"),
    "packed": _packing("rice"),
}

WHOLE: Final = "whole"
# New codes go to the end, after WHOLE: a code's place is its number in the header.
ALL_INDEX_CODES: Final = {
    **INDEX_CODES,
    WHOLE: IndexCode(lambda count, length: 0, _pack_whole, _unpack_whole),
}


class ValueCode(NamedTuple):
    """One way to write values."""

    element_bytes: Callable[[int], int]  # (bytes of a float) -> alignment of its elements
    size_bytes: Callable[[int, int], int]  # (count, bytes of a float) -> bytes it takes
    pack: Callable[[Array, Array], int]  # (values, buffer) -> exponent
    unpack: Callable[[Array, int, int, Any], Array]  # (bytes, count, exponent, dtype) -> values
    exponents: Callable[[np.dtype[Any]], range]  # that values of a dtype may have


def _pack_exact(values: Array, out: Array) -> int:
    out.view(values.dtype)[:] = values
    return 0


def _unpack_exact(data: Array, count: int, exponent: int, dtype: Any) -> Array:
    return data.view(dtype)


def _rounding(name: str, element_bytes: int) -> ValueCode:
    """Return a code that rounds; its size does not depend on the dtype of the values."""
    return ValueCode(
        lambda float_bytes: element_bytes,
        lambda count, float_bytes: value_bytes(count, name),
        partial(pack_values, code=name),
        partial(unpack_values, code=name),
        partial(exponent_range, name),
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
    "bf16": _rounding("bf16", 2),
    "fp16": _rounding("fp16", 2),
    "int8": _rounding("int8", 1),
    "int4": _rounding("int4", 1),
    "int3": _rounding("int3", 1),
    "int2": _rounding("int2", 1),
}

# By the bits of a value; of the two 16-bit codes, the one with float32's range.
CODES_OF_BITS: Final = {2: "int2", 3: "int3", 4: "int4", 8: "int8", 16: "bf16", 32: "exact"}

# The codes that an automatic choice may take. Fewer bits delay more of a gradient, at a cost in
# convergence that was not measured for every task, so the other codes are used only on request.
CHOSEN_FROM: Final = ("exact", "bf16", "fp16", "int8")


class Format(NamedTuple):
    """The codes of a message."""

    indices: str = "raw"  # "raw", "blocks" or "packed": fewer bytes, more time
    # "exact", "bf16", "fp16", "int8", "int4", "int3" or "int2": fewer bytes, more rounding
    values: str = "exact"


EXACT: Final = Format()

# The formats that a GPU codes itself; for others its vectors are copied to the host.
ON_DEVICE: Final = frozenset(
    Format(indices, values)
    for indices in ("raw", "blocks")
    for values in ("exact", "bf16", "fp16", "int4", "int3", "int2")
)

# A code's number in the header is its index here.
_INDEX_NAMES: Final = tuple(ALL_INDEX_CODES)
_VALUE_NAMES: Final = tuple(VALUE_CODES)


def check(format: Format) -> Format:
    """Return the format; raise ValueError unless both codes are for sparse vectors."""
    for part, code, names in (
        ("indices", format.indices, tuple(INDEX_CODES)),
        ("values", format.values, _VALUE_NAMES),
    ):
        if code not in names:
            raise ValueError(f"the code of {part} must be one of {', '.join(names)}; got {code!r}")
    return format


@functools.cache  # called for every message
def numbers(format: Format) -> tuple[int, int]:
    """Return the numbers of the codes."""
    return _INDEX_NAMES.index(format.indices), _VALUE_NAMES.index(format.values)


def numbered(index_code: int, value_code: int) -> Format:
    """Return the format with these numbers; raise ValueError if there is none."""
    if index_code >= len(_INDEX_NAMES) or value_code >= len(_VALUE_NAMES):
        raise ValueError(
            f"its codes have the numbers {index_code} and {value_code}; this rank has "
            f"{len(_INDEX_NAMES)} index codes and {len(_VALUE_NAMES)} value codes"
        )
    return Format(_INDEX_NAMES[index_code], _VALUE_NAMES[value_code])
