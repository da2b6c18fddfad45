"""Arrays as arguments of C functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...vector import Array
from .library import library

POINTER: Final = ctypes.c_void_p
COUNT: Final = ctypes.c_int64


class _Suffixes(dict[np.dtype[Any], str]):
    def __missing__(self, dtype: np.dtype[Any]) -> str:
        raise ValueError(
            f"the C++ core has no {dtype}: convert values with .astype(np.float32), "
            "indices with .astype(np.int32)"
        )


# The suffixes of C names, by dtype. Dtypes of foreign byte order are missing.
SUFFIX: Final = _Suffixes(
    {
        np.dtype(np.float16): "f16",
        np.dtype(np.uint16): "bf16",
        np.dtype(np.float32): "f32",
        np.dtype(np.float64): "f64",
        np.dtype(np.int32): "i32",
        np.dtype(np.int64): "i64",
    }
)

_byte: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer
_address: Final = ctypes.addressof


def address(array: Array) -> int:
    """Return where the data of a contiguous array begins; the caller keeps the array alive."""
    try:
        return _address(_byte(array))  # a third of the time that array.ctypes.data takes
    except (TypeError, ValueError):  # read-only, or empty
        return array.ctypes.data


def packed(array: Array) -> Array:
    """Return the array, or a copy where its elements lie apart or off their alignment."""
    flags = array.flags
    if flags.c_contiguous and flags.aligned:
        return array
    return np.array(array, order="C")


def function(name: str, *arguments: Any) -> dict[str, Callable[..., int]]:
    """Return the C function `name` by suffix, for every suffix it exists with."""
    loaded, found = library(), {}
    for suffix in (
        "f16",
        "bf16",
        "f32",
        "f64",
        "i32",
        "i64",
        "f32_i32",
        "f32_i64",
        "f64_i32",
        "f64_i64",
    ):
        entry = getattr(loaded, f"{name}_{suffix}", None)
        if entry is not None:
            entry.argtypes, entry.restype = arguments, COUNT
            found[suffix] = entry
    return found


def enough_memory(result: int) -> int:
    """Return the result of a C function that allocates; raise MemoryError where it failed."""
    if result < 0:
        raise MemoryError("the C++ core ran out of memory")
    return result
