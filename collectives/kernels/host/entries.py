"""Sparse vectors: merged, summed, and added to dense ones; and reductions of dense ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...vector import Array, SparseVector
from .. import reference
from .calls import COUNT, POINTER, address, enough_memory, function, packed, threads
from .library import library

_merge = function("merge", *(POINTER, POINTER, COUNT) * 2, COUNT, POINTER, POINTER)
_sum_by_index = function("sum_by_index", *(POINTER,) * 3, COUNT, POINTER, POINTER)
_contains = function("contains", *(POINTER, COUNT) * 2, POINTER)
_add_at = function("add_at", POINTER, COUNT, POINTER, POINTER, COUNT)
_clear_at = function("clear_at", POINTER, COUNT, POINTER, COUNT)
_clear_bytes: Any = getattr(library(), "clear_bytes", None)
# As in codes.py: there may be no library.
if _clear_bytes is not None:
    _clear_bytes.argtypes, _clear_bytes.restype = (POINTER, COUNT), None


def clear(dense: Array) -> None:
    """Set all elements of an array to zero."""
    if not dense.flags.carray:
        reference.clear(dense)
        return
    _clear_bytes(address(dense), dense.nbytes)


# Entries are written a vector at a time: room behind each list of them (scan.hpp says the same).
SLACK = 16


def merge(a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b."""
    a_indices, a_values, b_indices, b_values = map(packed, (*a[:2], *b[:2]))
    room = a_indices.size + b_indices.size
    indices = np.empty(room + SLACK, a_indices.dtype)
    values = np.empty(room + SLACK, a_values.dtype)
    kept = enough_memory(
        _merge[values.dtype, indices.dtype](
            *(address(a_indices), address(a_values), a_indices.size),
            *(address(b_indices), address(b_values), b_indices.size),
            # ctypes cuts a larger k to 64 bits.
            *(min(k, room), address(indices), address(values)),
        )
    )
    return SparseVector(indices[:kept], values[:kept], a.length)


def sum_by_index(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    lists = [(packed(vector.indices), packed(vector.values)) for vector in vectors]
    counts = [indices.size for indices, _ in lists]
    first = vectors[0]
    indices = np.empty(sum(counts) + SLACK, first.indices.dtype)
    values = np.empty(indices.size, first.values.dtype)
    number = len(lists)
    found = enough_memory(
        _sum_by_index[values.dtype, indices.dtype](
            (POINTER * number)(*[address(part) for part, _ in lists]),
            (POINTER * number)(*[address(part) for _, part in lists]),
            (COUNT * number)(*counts),
            *(number, address(indices), address(values)),
        )
    )
    return SparseVector(indices[:found], values[:found], first.length)


def contains(indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices` (both sorted): bool [wanted]."""
    # In one dtype: C++ has a function for each, not for pairs.
    indices, wanted = packed(indices), packed(wanted.astype(indices.dtype, copy=False))
    found = np.empty(wanted.size, np.bool_)
    _contains[indices.dtype](
        *(address(indices), indices.size, address(wanted), wanted.size, address(found)),
    )
    return found


def add_at(dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    if not dense.flags.carray or dense.dtype != vector.values.dtype:
        reference.add_at(dense, vector)
        return
    indices, values = packed(vector.indices), packed(vector.values)
    add = _add_at[dense.dtype, indices.dtype]
    if not add(address(dense), dense.size, address(indices), address(values), indices.size):
        raise _outside(dense, indices)


def clear_at(dense: Array, indices: Array) -> None:
    """Set the elements of a dense array at these indices to zero."""
    if not dense.flags.carray:
        reference.clear_at(dense, indices)
        return
    indices = packed(indices)
    clear = _clear_at[dense.dtype, indices.dtype]
    if not clear(address(dense), dense.size, address(indices), indices.size):
        raise _outside(dense, indices)


def _outside(dense: Array, indices: Array) -> IndexError:
    return IndexError(
        f"indices must lie in 0..{dense.size - 1}, got {int(indices[0])}..{int(indices[-1])}"
    )


_all_finite = function("all_finite", POINTER, COUNT)
_squared_norm = function("squared_norm", POINTER, COUNT, ctypes.c_int, POINTER)


def all_finite(array: Array) -> bool:
    """Tell whether every element is finite: no exponent is all ones."""
    array = packed(array)
    return bool(_all_finite[array.dtype](address(array), array.size))


def squared_norm(array: Array) -> float:
    """Return the sum of squares, in the order of additions of the reference."""
    array = packed(array)
    norm = ctypes.c_double()
    count = _squared_norm[array.dtype]
    enough_memory(count(address(array), array.size, threads(), ctypes.addressof(norm)))
    return norm.value
