"""The wire's hot loops: the bytes of `reference_codes`, written and read in C++.

C++ only reports that bytes are malformed; the error's text comes from the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...vector import Array, index_dtype
from .. import reference_codes
from .calls import COUNT, POINTER, address, function, packed
from .library import library

_checksum: Final[Any] = getattr(library(), "code_checksum", None)
# This package is imported without a library, too: `library` says why there is none.
if _checksum is not None:
    _checksum.argtypes, _checksum.restype = (POINTER, COUNT, ctypes.c_uint64), ctypes.c_uint64
_in_order: Final = function("code_in_order", POINTER, COUNT, COUNT)
_INDICES: Final = (POINTER, COUNT, COUNT, POINTER)
_BYTES: Final = (POINTER, COUNT, COUNT, COUNT, POINTER)
_VALUES: Final = (POINTER, COUNT, POINTER)
_ROUNDED: Final = (POINTER, COUNT, COUNT, POINTER)


def checksum(data: Array, seed: int = 0) -> int:
    """Return the 64 bits of `data` (uint8 [n]); seed: what came before it, as 64 bits."""
    number: int = _checksum(address(data), data.size, seed)
    return number


def in_order(indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length."""
    return bool(_in_order[indices.dtype](address(indices), indices.size, length))


def _index_code(name: str) -> tuple[Callable[..., int], Callable[..., tuple[Array, int]]]:
    pack_in_c = function(f"code_pack_{name}", *_INDICES)
    unpack_in_c = function(f"code_unpack_{name}", *_BYTES)
    reasons = getattr(reference_codes, f"unpack_{name}")

    def pack(indices: Array, length: int, out: Array) -> int:
        """Write the indices, int32 or int64 [k], into `out` (uint8)."""
        indices = packed(indices)
        pack_indices = pack_in_c[indices.dtype]
        return pack_indices(address(indices), indices.size, length, address(out))

    def unpack(data: Array, count: int, length: int) -> tuple[Array, int]:
        """Return the indices, int32 or int64 [count], and how many bytes of `data` they took."""
        # An entry takes at least a bit: a false count cannot make us allocate much more memory.
        indices = np.empty(min(count, 8 * data.size), index_dtype(length))
        unpack_indices = unpack_in_c[indices.dtype]
        used = -1
        if indices.size == count:
            used = unpack_indices(address(data), data.size, count, length, address(indices))
        if used < 0:
            # The reference refuses the same bytes: it raises the error, with the reason.
            reasons(data, count, length)
            raise AssertionError(f"the twins of unpack_{name} differ")
        return indices, used

    return pack, unpack


def _value_code(name: str) -> tuple[Callable[..., int], Callable[..., Array]]:
    pack_in_c = function(f"code_pack_{name}", *_VALUES)
    unpack_in_c = function(f"code_unpack_{name}", *_ROUNDED)

    def pack(values: Array, out: Array) -> int:
        """Write the values, float32 or float64 [k]; return the exponent."""
        values = packed(values)
        return pack_in_c[values.dtype](address(values), values.size, address(out))

    def unpack(data: Array, count: int, exponent: int, dtype: np.dtype[Any]) -> Array:
        """Return the values, of the dtype, [count]."""
        values = np.empty(count, dtype)
        unpack_values = unpack_in_c[values.dtype]
        unpack_values(address(data), count, exponent, address(values))
        return values

    return pack, unpack


pack_blocks, unpack_blocks = _index_code("blocks")
pack_rice, unpack_rice = _index_code("rice")
pack_bf16, unpack_bf16 = _value_code("bf16")
pack_fp16, unpack_fp16 = _value_code("fp16")
pack_int8, unpack_int8 = _value_code("int8")
pack_int4, unpack_int4 = _value_code("int4")
pack_int3, unpack_int3 = _value_code("int3")
pack_int2, unpack_int2 = _value_code("int2")
