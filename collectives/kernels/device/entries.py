"""Sparse vectors on a GPU: merge, sum, add to dense ones. Norms and checks of dense vectors."""

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
    """Set the vector's entries in the arrays that make up the dense vector."""
    require_parts(parts, vector.values.dtype, vector.length, "the parts must be of the vector's")
    if not isinstance(parts, Located):
        require_packed(*parts)
    machine = scratch.machine
    if vector.entries:
        # Nothing to keep alive: parts that are not contiguous were refused, so none is copied.
        locations, _ = located(machine, parts)
        machine.launch(
            instance("put_at", vector.values.dtype, vector.indices.dtype, locations.dtype),
            blocks_for(machine, vector.entries),
            parts_table(scratch, "put table", locations),
            np.uint32(len(locations.sizes)),
            vector.indices,
            vector.values,
            np.uint64(vector.entries),
        )


def all_finite(scratch: Scratch, array: Array) -> bool:
    """Tell whether a one-dimensional array holds neither NaN nor infinity. Waits for the result."""
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

    All are of one dtype, and share one launch and one wait.
    """
    machine = scratch.machine
    locations, kept_alive = located(machine, arrays)
    counts = [ceil_divide(size, NORM_CHUNK) for size in locations.sizes]
    chunks = sum(counts)
    if not chunks:
        return [0.0] * len(counts)
    rows = zip(accumulate(counts, initial=0), locations.addresses, locations.sizes, strict=False)
    table = np.array([number for row in rows for number in row], np.uint64)
    totals = machine.empty(len(counts), np.float64)
    machine.launch(
        instance("sum_squares", locations.dtype),
        blocks_for(machine, chunks * 16),
        scratch.written("norm table", table),
        np.uint32(len(counts)),
        np.uint64(chunks),
        scratch.array("squares", chunks, np.float64),
        scratch.array("ticket", 1, np.uint32),
        totals,
    )
    found: list[float] = machine.fetch(totals).tolist()
    del kept_alive  # the kernel that read it is done
    return found


def merge(scratch: Scratch, a: SparseVector, b: SparseVector, k: int) -> SparseVector:
    """Return the k largest entries of a + b."""
    return sum_by_index(scratch, [a, b], k)


def sum_by_index(
    scratch: Scratch, vectors: Sequence[SparseVector], k: int | None = None
) -> SparseVector:
    """Return the k largest entries of the sum, or all that are not zero, in the vectors' order."""
    first = vectors[0]
    indices, values = _interleaved_sum(scratch, vectors)
    count = indices.size
    if not count:
        return first
    k = count if k is None else k
    kept = _room(scratch, first, min(k, count))
    search = launch_split(scratch, indices, values, k, kept)
    return kept.take(slice(read_result(scratch.machine, search, values.dtype).kept))


def _interleaved_sum(scratch: Scratch, vectors: Sequence[SparseVector]) -> tuple[Array, Array]:
    """Return the sorted indices of all vectors; values: an index's sum at its first place, else 0.

    Neighbours are interleaved pairwise, and then the results: equal indices stay in the vectors'
    order, and an entry takes part in at most ceil(log2(vectors)) launches.
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
    """Return both vectors' entries in one sorted list, where an index may be there twice."""
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
