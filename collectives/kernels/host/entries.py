"""Sparse vectors: merged, summed, and added to dense ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ...vector import Array, SparseVector
from .arguments import COUNT, POINTER, SUFFIX, address, enough_memory, function, packed

_merge = function("merge", *(POINTER, POINTER, COUNT) * 2, COUNT, POINTER, POINTER, POINTER)
_sum_by_index = function("sum_by_index", *(POINTER,) * 3, COUNT, POINTER, POINTER)
_contains = function("contains", *(POINTER, COUNT) * 2, POINTER)
_add_at = function("add_at", POINTER, POINTER, POINTER, COUNT)
_clear_at = function("clear_at", POINTER, POINTER, COUNT)


def merge(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Return the k largest entries of a + b, and the other nonzero entries."""
    a_indices, a_values, b_indices, b_values = map(packed, (*a[:2], *b[:2]))
    room = a_indices.size + b_indices.size
    indices, values = np.empty(room, a_indices.dtype), np.empty(room, a_values.dtype)
    kept = ctypes.c_int64()
    count = enough_memory(
        _merge[_suffix(a)](
            *(address(a_indices), address(a_values), a_indices.size),
            *(address(b_indices), address(b_values), b_indices.size),
            *(k, address(indices), address(values), ctypes.addressof(kept)),
        )
    )
    split = kept.value
    return (
        SparseVector(indices[:split], values[:split], a.length),
        SparseVector(indices[split:count], values[split:count], a.length),
    )


def sum_by_index(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    lists = [(packed(vector.indices), packed(vector.values)) for vector in vectors]
    counts = [indices.size for indices, _ in lists]
    first = vectors[0]
    indices = np.empty(sum(counts), first.indices.dtype)
    values = np.empty(indices.size, first.values.dtype)
    number = len(lists)
    found = enough_memory(
        _sum_by_index[_suffix(first)](
            (POINTER * number)(*[address(part) for part, _ in lists]),
            (POINTER * number)(*[address(part) for _, part in lists]),
            (COUNT * number)(*counts),
            *(number, address(indices), address(values)),
        )
    )
    return SparseVector(indices[:found], values[:found], first.length)


def contains(indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices` (both sorted): bool [wanted]."""
    indices, wanted = packed(indices), packed(wanted)
    found = np.empty(wanted.size, np.bool_)
    _contains[SUFFIX[indices.dtype.char]](
        *(address(indices), indices.size, address(wanted), wanted.size, address(found)),
    )
    return found


def add_at(dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    if not dense.flags.carray:
        dense[vector.indices] += vector.values
        return
    indices, values = packed(vector.indices), packed(vector.values)
    _add_at[_suffix(vector)](address(dense), address(indices), address(values), indices.size)


def clear_at(dense: Array, indices: Array) -> None:
    """Set the elements of a dense array at these indices to zero."""
    if not dense.flags.carray:
        dense[indices] = 0
        return
    indices = packed(indices)
    suffix = f"{SUFFIX[dense.dtype.char]}_{SUFFIX[indices.dtype.char]}"
    _clear_at[suffix](address(dense), address(indices), indices.size)


def _suffix(vector: SparseVector) -> str:
    return f"{SUFFIX[vector.values.dtype.char]}_{SUFFIX[vector.indices.dtype.char]}"
