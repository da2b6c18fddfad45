"""The hot loops for CuPy arrays in CUDA C++; each function is the twin of one in `reference`.

Everything runs on CuPy's current stream. Functions whose result's size or value the host needs wait
for the GPU once, and copy a few bytes (accumulate_and_select, select, merge, sum_by_index,
all_finite, squared_norms). The others are asynchronous.

    source.py     the .cu files as texts, and which kernels there are
    machine.py    the interface to a GPU
    cuda.py       that interface, through CuPy
    selection.py  select and split: the sequence of launches
    entries.py    sparse vectors: merge, sum, add to dense ones; norms and checks of dense vectors
    codes.py      the wire's codes
    step.py       accumulate and select of one residual, as a CUDA graph
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...vector import Array, Located, SparseVector
from . import codes, cuda, entries, selection
from .cuda import cupy, from_dlpack, on_stream
from .step import Step

__all__ = [
    "Step",
    "accumulate_and_select",
    "add_at",
    "all_finite",
    "clear_at",
    "contains",
    "cupy",
    "from_dlpack",
    "in_order",
    "merge",
    "on_stream",
    "open_step",
    "pack_indices",
    "pack_values",
    "put_at",
    "read_head",
    "select",
    "squared_norm",
    "squared_norms",
    "sum_by_index",
    "unpack_indices",
    "unpack_values",
    "write_head",
]

Result = TypeVar("Result")


def _by_first_array(work: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function without its first parameter, the scratch memory of the array's device."""

    @functools.wraps(work)
    def run(array: Array, *arguments: Any, **options: Any) -> Result:
        return work(cuda.scratch(array), array, *arguments, **options)

    return run


accumulate_and_select = _by_first_array(selection.accumulate_and_select)
select = _by_first_array(selection.select)
contains = _by_first_array(entries.contains)
add_at = _by_first_array(entries.add_at)
clear_at = _by_first_array(entries.clear_at)
all_finite = _by_first_array(entries.all_finite)
write_head = _by_first_array(codes.write_head)
read_head = _by_first_array(codes.read_head)
in_order = _by_first_array(codes.in_order)
pack_indices = _by_first_array(codes.pack_indices)
unpack_indices = _by_first_array(codes.unpack_indices)
pack_values = _by_first_array(codes.pack_values)
unpack_values = _by_first_array(codes.unpack_values)


def merge(a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b."""
    return entries.merge(cuda.scratch(a.values), a, b, k)


def sum_by_index(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    return entries.sum_by_index(cuda.scratch(vectors[0].values), vectors)


def put_at(parts: Sequence[Array] | Located, vector: SparseVector) -> None:
    """Set the vector's entries in the arrays that make up the dense vector."""
    entries.put_at(cuda.scratch(vector.values), parts, vector)


def open_step(residual: Array, k: int) -> Step:
    """Return a Step that accumulates into this residual and selects k entries."""
    return Step(cuda.scratch(residual).machine, residual.size, k, residual.dtype)


def squared_norm(array: Array) -> float:
    """Return the sum of squares of a one-dimensional array, in float64."""
    return squared_norms([array])[0]


def squared_norms(arrays: Sequence[Array] | Located) -> list[float]:
    """Return the sum of squares of each array, all of one dtype, in float64; waits once."""
    # An address does not tell its device: for a Located the caller has made it current.
    scratch = cuda.current_scratch() if isinstance(arrays, Located) else cuda.scratch(arrays[0])
    return entries.squared_norms(scratch, arrays)
