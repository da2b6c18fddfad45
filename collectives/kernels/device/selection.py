"""Select on a GPU: one fixed sequence of launches, none of which waits for the host.

    begin   mark    search x levels   remark   expand   search x levels   count   split
              |      (the vector)       |        |          (the list)
    good guess:  bits, a few more than k  ---->  list  ------->  k-th key  ---->  k entries
    bad guess:   ---> k-th key  ------> bits, k exactly -> list  -------------->  k entries

The kernels decide on the device which of the two it is; those that are not needed end at once. So
the sequence can be captured in a CUDA graph, and the host waits once, for the number of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...vector import Array, SparseVector, index_dtype
from ..gradients import Gradient, Momentum, gradient_parts, require_selectable
from .machine import Machine, Scratch, blocks_for, ceil_divide, require_packed
from .source import instance
from .table import parts_table

# `Search` and `Tally` of search.cuh, in words.
SEARCH_WORDS: Final = 15  # uint64; the first three are the outcome: kept, rest, next guess
OUTCOME_WORDS: Final = 3
TALLY_WORDS: Final = 3  # uint32
BINS: Final = 2048

# Levels until a bin is one key wide, whatever the range at the start: 31 / 11 and 63 / 11 bits.
LEVELS: Final = {np.dtype(np.float32): 3, np.dtype(np.float64): 6}

LONGEST: Final = 2**32 - 1  # tallies count in 32 bits
FROM_DEVICE: Final = float("nan")  # as a guess: what the last search of this scratch left


class Outcome(NamedTuple):
    """What a search found."""

    kept: int
    rest: int
    threshold: float


def accumulate_and_select(
    scratch: Scratch,
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
) -> tuple[SparseVector, float]:
    """Add to `residual` in place and select from the sum."""
    parts = gradient_parts(residual, gradient, k, momentum)
    return _select(scratch, residual, parts, k, threshold, momentum, weight)


def select(
    scratch: Scratch, dense: Array, k: int, threshold: float = 0.0
) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold for the next search."""
    require_selectable(dense, k)
    return _select(scratch, dense, (), k, threshold, None, 1.0)


def _select(
    scratch: Scratch,
    dense: Array,
    parts: Sequence[Array],
    k: int,
    threshold: float,
    momentum: Momentum | None,
    weight: float,
) -> tuple[SparseVector, float]:
    guess = threshold if threshold > 0.0 else 0.0  # NaN is no guess here
    machine = scratch.machine
    require_packed(dense, None if momentum is None else momentum.velocity)
    parts = [machine.packed(part) for part in parts]
    indices = machine.empty(k, index_dtype(dense.size))
    values = machine.empty(k, dense.dtype)
    search = launch_selection(scratch, dense, parts, k, guess, indices, values, momentum, weight)
    kept, _, following = outcome(machine, search, dense.dtype)
    return SparseVector(indices[:kept], values[:kept], dense.size), following


class ListSearch(NamedTuple):
    """The device memory of a search among the m entries of a list."""

    search: Array  # uint64 [SEARCH_WORDS]
    histogram: Array  # uint32 [BINS]
    tallies: Array  # uint32 [TALLY_WORDS]: for each tile of the list
    groups: Array  # uint32 [TALLY_WORDS]: for each group of the list's tiles
    indices: Array  # [m]
    values: Array  # [m]


class Buffers(NamedTuple):
    """The device memory of one selection: of the pass over the vector, and of its candidates."""

    bits: Array  # uint32: one bit for each element, whole tiles
    tallies: Array  # uint32 [TALLY_WORDS]: for each tile of the vector
    groups: Array  # uint32 [TALLY_WORDS]: for each group of tiles, the vector's and then the list's
    candidates: ListSearch  # its tallies are those of the vector, which is done with them by then


def buffers(scratch: Scratch, length: int, k: int, dtype: np.dtype[Any]) -> Buffers:
    """Return the memory that a selection of k entries from `length` elements works in."""
    if length > LONGEST:
        raise ValueError(f"a GPU selects from at most {LONGEST} elements, got {length}")
    threads = scratch.machine.threads
    # A good guess makes about 2.2 k candidates; in training the most seen was 5 k.
    capacity = min(length, 8 * k + 4096)
    tiles, list_tiles = _tiles(length, threads), ceil_divide(capacity, threads)
    groups = TALLY_WORDS * ceil_divide(tiles, threads)
    list_groups = TALLY_WORDS * ceil_divide(list_tiles, threads)
    both = scratch.array("groups", groups + list_groups, np.uint32)
    tallies = scratch.array("tallies", TALLY_WORDS * max(tiles, list_tiles), np.uint32)
    candidates = ListSearch(
        scratch.array("search", SEARCH_WORDS, np.uint64),
        scratch.array("histogram", BINS, np.uint32),
        tallies,
        both[groups:],
        scratch.array("list", capacity, index_dtype(length)),
        scratch.array("list", capacity, dtype),
    )
    return Buffers(scratch.array("bits", tiles * threads, np.uint32), tallies, both, candidates)


def _tiles(length: int, threads: int) -> int:
    return ceil_divide(length, 32 * threads)


def launch_selection(
    scratch: Scratch,
    dense: Array,
    parts: Sequence[Array],
    k: int,
    guess: float,
    indices: Array,
    values: Array,
    momentum: Momentum | None,
    weight: float = 1.0,
) -> Array:
    """Launch all that leaves the k largest entries in `indices` and `values`, [k] both.

    parts: what is added first, in the order of the vector; none, one or several arrays.
    Returns the search on the device; its first words tell, in time, what `outcome` reads.
    """
    machine, n, real = scratch.machine, dense.size, dense.dtype
    index = indices.dtype
    memory = buffers(scratch, n, k, real)
    candidates = memory.candidates
    search, histogram = candidates.search, candidates.histogram
    tiles = _tiles(n, machine.threads)
    length = np.uint64(n)
    sources = 0 if not parts else 1 if momentum is None else 2
    addend = parts[0].dtype if parts else real

    _begin(machine, candidates, memory.groups, k, 0, guess)
    machine.launch(
        instance("mark", real, addend, sources),
        min(machine.blocks, tiles),
        dense,
        None if momentum is None else momentum.velocity,
        parts[0] if len(parts) == 1 else None,
        parts_table(machine, parts) if len(parts) > 1 else None,
        np.uint32(len(parts) if len(parts) > 1 else 0),
        np.float64(weight),
        np.float64(0.0 if momentum is None else momentum.factor),
        length,
        search,
        histogram,
        memory.bits,
        memory.tallies,
        memory.groups,
    )
    _search(machine, search, histogram, dense, over_list=False)
    machine.launch(
        instance("remark", real),
        min(machine.blocks, tiles),
        dense,
        length,
        search,
        memory.bits,
        memory.tallies,
        memory.groups,
    )
    machine.launch(
        instance("expand", real, index),
        min(machine.blocks, tiles),
        dense,
        search,
        np.uint64(tiles),
        memory.bits,
        memory.tallies,
        memory.groups,
        candidates.indices,
        candidates.values,
    )
    _search(machine, search, histogram, candidates.values, over_list=True)
    _count_and_split(machine, candidates, indices, values, None, None)
    return search


def launch_split(
    scratch: Scratch,
    list_indices: Array,
    list_values: Array,
    k: int,
    kept: SparseVector,
    rest: SparseVector | None,
) -> Array:
    """Launch all that splits a sorted list into its k largest entries and the rest; zeros vanish.

    kept, rest: memory for the most there can be; rest None where it is not wanted.
    """
    machine, m = scratch.machine, list_indices.size
    tiles = ceil_divide(m, machine.threads)
    groups = scratch.array(
        "split groups", TALLY_WORDS * ceil_divide(tiles, machine.threads), np.uint32
    )
    entries = ListSearch(
        scratch.array("split search", SEARCH_WORDS, np.uint64),
        scratch.array("histogram", BINS, np.uint32),
        scratch.array("tallies", TALLY_WORDS * tiles, np.uint32),
        groups,
        list_indices,
        list_values,
    )
    _begin(machine, entries, groups, k, m, 0.0)
    if k < m:
        _search(machine, entries.search, entries.histogram, list_values, over_list=True)
    rest_indices, rest_values = (None, None) if rest is None else (rest.indices, rest.values)
    _count_and_split(machine, entries, kept.indices, kept.values, rest_indices, rest_values)
    return entries.search


def _begin(
    machine: Machine, of: ListSearch, groups: Array, k: int, entries: int, guess: float
) -> None:
    """Clear the search and all groups. entries: of the list by now."""
    machine.launch(
        instance("begin", of.values.dtype),
        1,
        of.search,
        of.histogram,
        groups,
        np.uint32(groups.size // TALLY_WORDS),
        np.uint64(k),
        np.uint64(of.indices.size),
        np.uint64(entries),
        np.float64(guess),
    )


def _search(
    machine: Machine, search: Array, histogram: Array, values: Array, over_list: bool
) -> None:
    for _ in range(LEVELS[values.dtype]):
        machine.launch(
            instance("search_level", values.dtype),
            blocks_for(machine, values.size, each=4),
            values,
            np.uint64(values.size),
            search,
            histogram,
            np.uint32(over_list),
        )


def _count_and_split(
    machine: Machine,
    of: ListSearch,
    kept_indices: Array,
    kept_values: Array,
    rest_indices: Array | None,
    rest_values: Array | None,
) -> None:
    blocks = blocks_for(machine, of.values.size)
    machine.launch(
        instance("count", of.values.dtype), blocks, of.values, of.search, of.tallies, of.groups
    )
    machine.launch(
        instance("split", of.values.dtype, of.indices.dtype),
        blocks,
        of.indices,
        of.values,
        of.search,
        of.tallies,
        of.groups,
        kept_indices,
        kept_values,
        rest_indices,
        rest_values,
    )


def outcome(machine: Machine, search: Array, real: np.dtype[Any]) -> Outcome:
    """Return what a search found: the one copy to the host, 24 bytes, and the one wait for it."""
    kept, rest, key = machine.fetch(search[:OUTCOME_WORDS]).tolist()
    bits = np.uint32 if real == np.float32 else np.uint64
    return Outcome(kept, rest, float(np.array(key, bits).view(real)))
