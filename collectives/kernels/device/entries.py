"""Sparse vectors on a GPU: merged, summed, and added to dense ones; dense ones in one number."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...vector import Array, Located, SparseVector, require_parts
from ..reference import NORM_CHUNK
from .machine import Scratch, blocks_for, ceil_divide, located, parts_table, require_packed
from .selection import launch_split, read_result
from .source import instance


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
        # No copy has to be kept alive: parts that would need one were refused.
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
    # The reference's chunks: the kernel adds in its order.
    counts = [ceil_divide(size, NORM_CHUNK) for size in where.sizes]
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


def merge(scratch: Scratch, a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b.

    One float addition for an index in both, hence the same bits for (a, b) and (b, a).
    """
    indices, values = _interleaved_sum(scratch, [a, b])
    if not indices.size:
        return a
    kept = _room(scratch, a, min(k, indices.size))
    search = launch_split(scratch, indices, values, k, kept)
    return _first(kept, read_result(scratch.machine, search, values.dtype).kept)


def sum_by_index(scratch: Scratch, vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    first = vectors[0]
    indices, values = _interleaved_sum(scratch, vectors)
    if not indices.size:
        return first
    kept = _room(scratch, first, indices.size)
    search = launch_split(scratch, indices, values, indices.size, kept)
    return _first(kept, read_result(scratch.machine, search, values.dtype).kept)


def _interleaved_sum(scratch: Scratch, vectors: Sequence[SparseVector]) -> tuple[Array, Array]:
    """Return the indices of all lists in order, and the sum at the first of each run, else 0.

    Neighbours are interleaved in pairs, and the pairs in pairs, so equal indices stay in the
    order of the list, and no entry takes part in more than log2 of the lists' number of launches.
    """
    machine = scratch.machine
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        last = vectors[-1:] if len(vectors) % 2 else ()
        vectors = [*(_interleave(scratch, a, b) for a, b in pairs), *last]
    indices, values, _ = vectors[0]
    sums = machine.empty(values.size, values.dtype)
    if values.size:
        machine.launch(
            instance("sum_runs", values.dtype, indices.dtype),
            blocks_for(machine, values.size),
            indices,
            values,
            np.uint64(values.size),
            sums,
        )
    return indices, sums


def _interleave(scratch: Scratch, a: SparseVector, b: SparseVector) -> SparseVector:
    """Return both lists as one sorted list; it may hold an index twice, so it is no vector yet."""
    machine, count = scratch.machine, a.entries + b.entries
    both = _room(scratch, a, count)
    if count:
        machine.launch(
            instance("interleave", a.values.dtype, a.indices.dtype),
            blocks_for(machine, count),
            a.indices,
            a.values,
            np.uint64(a.entries),
            b.indices,
            b.values,
            np.uint64(b.entries),
            both.indices,
            both.values,
        )
    return both


def _room(scratch: Scratch, like: SparseVector, count: int) -> SparseVector:
    machine = scratch.machine
    return SparseVector(
        machine.empty(count, like.indices.dtype),
        machine.empty(count, like.values.dtype),
        like.length,
    )


def _first(vector: SparseVector, count: int) -> SparseVector:
    return SparseVector(vector.indices[:count], vector.values[:count], vector.length)
