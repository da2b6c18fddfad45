"""Accumulate and select: the one pass over a dense vector."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from ...vector import Array, SparseVector, index_dtype
from ..gradients import Gradient, Momentum, host_parts, require_selectable
from .calls import COUNT, POINTER, address, enough_memory, function, packed, threads

_select = function(
    "select",
    *(POINTER, POINTER, COUNT),  # before, dense
    *(POINTER, POINTER, ctypes.c_int32, ctypes.c_double),  # gradient, its weight
    *(POINTER, POINTER, ctypes.c_double),  # velocity, where it goes, momentum
    *(COUNT, ctypes.c_double, ctypes.c_int),  # k, threshold, threads
    *(POINTER, POINTER, POINTER),  # indices, values, report
)

# gradient.hpp: Format, by the dtype of the gradient's arrays.
_SAME: Final = 0  # as the residual: `host_parts` has looked
_FORMATS: Final = {
    np.dtype(np.float32): _SAME,
    np.dtype(np.float64): _SAME,
    np.dtype(np.float16): 1,
    np.dtype(np.uint16): 2,
}
_NO_GRADIENT: Final = (None, None, _SAME, 1.0, None, None, 0.0)


class Report(ctypes.Structure):
    """Statistics of a search; scans: passes over the vector, above 1 where the threshold misled."""

    _fields_ = (("next_threshold", ctypes.c_double), ("scans", COUNT))

    next_threshold: float
    scans: int


def select(dense: Array, k: int, threshold: float = 0.0) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold for the next search."""
    require_selectable(dense, k)
    dense = packed(dense)
    picked, report = _search(dense, dense, _NO_GRADIENT, k, threshold)
    return picked, report.next_threshold


def accumulate_and_select(
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
    into: Array | None = None,
) -> tuple[SparseVector, float]:
    """Add to `residual`, in place or into other memory, and select from the sum.

    A MemoryError leaves the gradient added as a whole, or not at all.
    """
    picked, report = search(residual, gradient, k, threshold, momentum, weight, into)
    return picked, report.next_threshold


def search(
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
    into: Array | None = None,
) -> tuple[SparseVector, Report]:
    """Return as `accumulate_and_select`, with a report instead of the next threshold."""
    # Held until the call is over: C++ reads them by their addresses.
    parts = [packed(part) for part in host_parts(residual, gradient, k, momentum, into)]
    sums = residual if into is None else into
    touched = [residual, sums]
    if momentum is not None:
        faster = momentum.velocity if momentum.into is None else momentum.into
        touched += [momentum.velocity, faster]
    if not all(array.flags.carray for array in touched):
        return _search_in_copies(residual, parts, k, threshold, momentum, weight, sums)
    count = len(parts)
    arrays = (POINTER * count)(*map(address, parts))
    lengths = (COUNT * count)(*[part.size for part in parts])
    given = (
        ctypes.addressof(arrays),
        ctypes.addressof(lengths),
        _FORMATS[parts[0].dtype],
        weight,
        *(
            (None, None, 0.0)
            if momentum is None
            else (address(momentum.velocity), address(faster), momentum.factor)
        ),
    )
    return _search(residual, sums, given, k, threshold)


def _search_in_copies(
    residual: Array,
    parts: list[Array],
    k: int,
    threshold: float,
    momentum: Momentum | None,
    weight: float,
    into: Array,
) -> tuple[SparseVector, Report]:
    """Search for arrays that are not contiguous."""
    sums = residual.copy()
    moved = None if momentum is None else Momentum(momentum.velocity.copy(), momentum.factor)
    found = search(sums, parts, k, threshold, moved, weight)
    # Only now: an error of the search leaves the caller's arrays as they were.
    into[:] = sums
    if momentum is not None and moved is not None:
        (momentum.velocity if momentum.into is None else momentum.into)[:] = moved.velocity
    return found


def _search(
    before: Array, dense: Array, given: tuple[object, ...], k: int, threshold: float
) -> tuple[SparseVector, Report]:
    indices = np.empty(k, index_dtype(dense.size))
    values = np.empty(k, dense.dtype)
    report = Report()
    found = enough_memory(
        _select[dense.dtype, indices.dtype](
            *(address(before), address(dense), dense.size, *given, k, threshold, threads()),
            *(address(indices), address(values), ctypes.addressof(report)),
        )
    )
    return SparseVector(indices[:found], values[:found], dense.size), report
