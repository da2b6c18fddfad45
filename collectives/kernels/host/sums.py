"""Reductions of a whole vector to one number."""

from __future__ import annotations

import ctypes

from ...vector import Array
from .arguments import COUNT, POINTER, SUFFIX, address, enough_memory, function, packed
from .threads import threads

_all_finite = function("all_finite", POINTER, COUNT)
_squared_norm = function("squared_norm", POINTER, COUNT, ctypes.c_int, POINTER)


def all_finite(array: Array) -> bool:
    """Tell whether every element is finite: no exponent is all ones."""
    array = packed(array)
    return bool(_all_finite[SUFFIX[array.dtype]](address(array), array.size))


def squared_norm(array: Array) -> float:
    """Return the sum of squares, in the order of additions of the reference."""
    array = packed(array)
    norm = ctypes.c_double()
    count = _squared_norm[SUFFIX[array.dtype]]
    enough_memory(count(address(array), array.size, threads(), ctypes.addressof(norm)))
    return norm.value
