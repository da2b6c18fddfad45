"""Merge and sum sparse vectors on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...vector import Array, SparseVector
from .machine import Scratch, blocks_for
from .selection import launch_split, read_result
from .source import instance


def merge(
    scratch: Scratch, a: SparseVector, b: SparseVector, k: int
) -> tuple[SparseVector, SparseVector]:
    """Return the k largest entries of a + b, and the other nonzero entries of a + b.

    One float addition for an index in both, hence the same bits for (a, b) and (b, a).
    """
    indices, values = _interleaved_sum(scratch, [a, b])
    if not indices.size:
        return a, b
    kept = _room(scratch, a, min(k, indices.size))
    rest = _room(scratch, a, indices.size)
    search = launch_split(scratch, indices, values, k, kept, rest)
    found = read_result(scratch.machine, search, values.dtype)
    return _first(kept, found.kept), _first(rest, found.rest)


def sum_by_index(scratch: Scratch, vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the nonzero entries of the sum; each index is summed in the order of the list."""
    first = vectors[0]
    indices, values = _interleaved_sum(scratch, vectors)
    if not indices.size:
        return first
    kept = _room(scratch, first, indices.size)
    search = launch_split(scratch, indices, values, indices.size, kept, None)
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
