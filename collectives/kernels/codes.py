"""The hot loops of the wire: one interface and its implementations, called twins.

`reference_codes` is NumPy, and defines the bytes; `host.codes` is C++. Twins write the same bytes,
and refuse the same ones.

`pack_...` writes into a buffer, uint8, of at least `..._capacity` or exactly `..._bytes` bytes.
`unpack_...` reads bytes from any sender: a ValueError says what is wrong with them.

For arrays on a GPU there are `in_order`, the blocks, the 16-bit floats and the integers of 2 to 4
bits; `write_head` and `read_head` are only for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..vector import Array
from . import _twin, reference, reference_codes
from .reference_codes import (
    blocks_capacity,
    exponent_range,
    few_bits_bytes,
    int8_bytes,
    rice_capacity,
)

__all__ = [
    "blocks_capacity",
    "checksum",
    "exponent_range",
    "few_bits_bytes",
    "in_order",
    "int8_bytes",
    "pack_bf16",
    "pack_blocks",
    "pack_fp16",
    "pack_int2",
    "pack_int3",
    "pack_int4",
    "pack_int8",
    "pack_rice",
    "read_head",
    "rice_capacity",
    "unpack_bf16",
    "unpack_blocks",
    "unpack_fp16",
    "unpack_int2",
    "unpack_int3",
    "unpack_int4",
    "unpack_int8",
    "unpack_rice",
    "write_head",
]

# (indices, length, buffer) -> bytes taken; (bytes, count, length) -> indices, bytes taken
PackIndices = Callable[[Array, int, Array], int]
UnpackIndices = Callable[[Array, int, int], tuple[Array, int]]
# (bytes, count, exponent, dtype) -> values
Unpack = Callable[[Array, int, int, Any], Array]


def _codes(array: Array) -> Any:
    twin = _twin(array)
    return reference_codes if twin is reference else twin.codes


def checksum(data: Array, seed: int = 0) -> int:
    """Return the 64 bits of `data` (uint8 [n]); seed: what came before it, as 64 bits."""
    number: int = _codes(data).checksum(data, seed)
    return number


def write_head(message: Array, head: Array) -> None:
    """Write 56 bytes of the host and a checksum at a GPU message's beginning; waits for nothing.

    The checksum has 8 bytes; it covers all bytes after it, seeded with that of the 56 bytes.
    """
    _codes(message).write_head(message, head)


def read_head(message: Array) -> tuple[Array, int]:
    """Return a GPU message's first 64 bytes on the host, and the checksum that belongs there."""
    head, number = _codes(message).read_head(message)
    return head, number


def in_order(indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length."""
    fits: bool = _codes(indices).in_order(indices, length)
    return fits


def _index_code(name: str) -> tuple[PackIndices, UnpackIndices]:
    def pack(indices: Array, length: int, out: Array) -> int:
        """Write indices, int32 or int64 [k]; return the bytes taken."""
        used: int = getattr(_codes(indices), f"pack_{name}")(indices, length, out)
        return used

    def unpack(data: Array, count: int, length: int) -> tuple[Array, int]:
        """Return the indices, int32 or int64 [count], and how many bytes of `data` they took."""
        indices, used = getattr(_codes(data), f"unpack_{name}")(data, count, length)
        return indices, used

    return pack, unpack


def _value_code(name: str) -> tuple[Callable[[Array, Array], int], Unpack]:
    def pack(values: Array, out: Array) -> int:
        """Write values, float32 or float64 [k], into exactly their bytes; return their exponent."""
        exponent: int = getattr(_codes(values), f"pack_{name}")(values, out)
        return exponent

    def unpack(data: Array, count: int, exponent: int, dtype: Any) -> Array:
        """Return the values, of the dtype, [count]."""
        values: Array = getattr(_codes(data), f"unpack_{name}")(data, count, exponent, dtype)
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
