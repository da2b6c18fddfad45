"""The hot loops of CuPy arrays in CUDA C++: function for function the twins of `reference`.

Everything runs on CuPy's current stream. Functions whose result's size or value the host must know
wait for the GPU, once and for a few bytes (accumulate_and_select, select, merge, sum_by_index,
all_finite, squared_norms). The others only launch.

    source.py     the .cu files as texts, and which kernels there are
    machine.py    the interface of a GPU for the launch sequences
    cuda.py       that interface, through CuPy
    selection.py  select and split: the sequence of launches
    entries.py    sparse vectors: merged, summed, added; and a vector in one number
    codes.py      the wire's codes: the twin of reference_codes
    packing.py    16-bit offsets and values
    step.py       accumulate and select of one residual, as a CUDA graph
"""

from __future__ import annotations

from collections.abc import Sequence

from ...vector import Array, SparseVector
from ..gradients import Gradient, Located, Momentum
from . import codes, cuda, entries, selection
from .cuda import cupy, from_dlpack, on_stream
from .step import Step

__all__ = [
    "Step",
    "accumulate_and_select",
    "add_at",
    "all_finite",
    "clear_at",
    "codes",
    "contains",
    "cupy",
    "from_dlpack",
    "merge",
    "on_stream",
    "open_step",
    "put_at",
    "select",
    "squared_norm",
    "squared_norms",
    "sum_by_index",
]


def accumulate_and_select(
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
    into: Array | None = None,
) -> tuple[SparseVector, float]:
    """Add to `residual`, in place without `into`, and select from the sum."""
    scratch = cuda.scratch(residual)
    return selection.accumulate_and_select(
        scratch, residual, gradient, k, threshold, momentum, weight, into
    )


def select(dense: Array, k: int, threshold: float = 0.0) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold to begin the next search at."""
    return selection.select(cuda.scratch(dense), dense, k, threshold)


def merge(a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b."""
    return entries.merge(cuda.scratch(a.values), a, b, k)


def sum_by_index(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    return entries.sum_by_index(cuda.scratch(vectors[0].values), vectors)


def contains(indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices` (both sorted): bool [wanted]."""
    return entries.contains(cuda.scratch(indices), indices, wanted)


def add_at(dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    entries.add_at(cuda.scratch(dense), dense, vector)


def clear_at(dense: Array, indices: Array) -> None:
    """Set the elements at unique indices to zero."""
    entries.clear_at(cuda.scratch(dense), dense, indices)


def put_at(parts: Sequence[Array] | Located, vector: SparseVector) -> None:
    """Set the vector's entries in the arrays that it lies in, one after the other."""
    entries.put_at(cuda.scratch(vector.values), parts, vector)


def open_step(residual: Array, k: int) -> Step:
    """Return a Step that accumulates into this residual and selects k entries, step after step."""
    return Step(cuda.scratch(residual).machine, residual.size, k, residual.dtype)


def all_finite(array: Array) -> bool:
    """Tell whether a one-dimensional array holds neither NaN nor infinity."""
    return entries.all_finite(cuda.scratch(array), array)


def squared_norm(array: Array) -> float:
    """Return the sum of squares of a one-dimensional array, in float64."""
    return squared_norms([array])[0]


def squared_norms(arrays: Sequence[Array] | Located) -> list[float]:
    """Return the sum of squares of each array, all of one dtype, in float64: one wait."""
    # A Located has addresses, which do not tell their device: the caller has made it current.
    scratch = cuda.current_scratch() if isinstance(arrays, Located) else cuda.scratch(arrays[0])
    return entries.squared_norms(scratch, arrays)
