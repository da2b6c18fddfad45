"""Small kernels on a GPU: single entries of a dense vector, and reductions of a whole vector."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...vector import Array, SparseVector
from ..gradients import Located, require_parts
from .machine import Scratch, blocks_for, ceil_divide, require_packed
from .source import instance
from .table import located, parts_table


def contains(scratch: Scratch, indices: Array, wanted: Array) -> Array:
    """Return, for each of `wanted`, whether it is in `indices` (both sorted): bool [wanted]."""
    machine = scratch.machine
    found = machine.empty(wanted.size, np.bool_)
    if wanted.size:
        machine.launch(
            instance("contains", indices.dtype),
            blocks_for(machine, wanted.size),
            indices,
            np.uint64(indices.size),
            wanted,
            np.uint64(wanted.size),
            found,
        )
    return found


def add_at(scratch: Scratch, dense: Array, vector: SparseVector) -> None:
    """Add the vector's entries to a dense array in place."""
    if vector.entries:
        scratch.machine.launch(
            instance("add_at", dense.dtype, vector.indices.dtype),
            blocks_for(scratch.machine, vector.entries),
            dense,
            vector.indices,
            vector.values,
            np.uint64(vector.entries),
        )


def clear_at(scratch: Scratch, dense: Array, indices: Array) -> None:
    """Set the elements at unique indices to zero."""
    if indices.size:
        scratch.machine.launch(
            instance("clear_at", dense.dtype, indices.dtype),
            blocks_for(scratch.machine, indices.size),
            dense,
            indices,
            np.uint64(indices.size),
        )


def put_at(scratch: Scratch, parts: Sequence[Array] | Located, vector: SparseVector) -> None:
    """Set the vector's entries in the arrays that it lies in, one after the other."""
    require_parts(parts, vector.values.dtype, vector.length, "the parts must be of the vector's")
    if not isinstance(parts, Located):
        require_packed(*parts)
    machine = scratch.machine
    if vector.entries:
        where, _ = located(machine, parts)
        machine.launch(
            instance("put_at", vector.values.dtype, vector.indices.dtype, where.dtype),
            blocks_for(machine, vector.entries),
            parts_table(scratch, "put table", where),
            np.uint32(len(where.sizes)),
            vector.indices,
            vector.values,
            np.uint64(vector.entries),
        )


def all_finite(scratch: Scratch, array: Array) -> bool:
    """Tell whether a one-dimensional array holds neither NaN nor infinity. Waits for the answer."""
    machine = scratch.machine
    if not array.size:
        return True
    flag = machine.zeros(1, np.uint32)
    machine.launch(
        instance("find_nonfinite", array.dtype),
        blocks_for(machine, array.size, each=4),
        array,
        np.uint64(array.size),
        flag,
    )
    return not machine.fetch(flag).item()


def squared_norms(scratch: Scratch, arrays: Sequence[Array] | Located) -> list[float]:
    """Return each array's sum of squares in float64, added in the reference's order.

    One launch, and one wait, for all of them, which are of one dtype.
    """
    machine = scratch.machine
    where, held = located(machine, arrays)
    counts = [ceil_divide(size, 1 << 16) for size in where.sizes]
    chunks = sum(counts)
    if not chunks:
        return [0.0] * len(counts)
    rows = zip(accumulate(counts, initial=0), where.addresses, where.sizes, strict=False)
    table = np.array([number for row in rows for number in row], np.uint64)
    totals = machine.empty(len(counts), np.float64)
    machine.launch(
        instance("sum_squares", where.dtype),
        blocks_for(machine, chunks * 16),
        scratch.written("norm table", table),
        np.uint32(len(counts)),
        np.uint64(chunks),
        scratch.array("squares", chunks, np.float64),
        scratch.array("ticket", 1, np.uint32),
        totals,
    )
    found: list[float] = machine.fetch(totals).tolist()
    del held  # the kernel that read it is done
    return found
