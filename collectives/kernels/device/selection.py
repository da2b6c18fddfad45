"""Select on a GPU: four launches without waiting for the host in between.

    begin    mark             expand              split
              |                  |                  |
           reads the vector:  reads the marked:  reads the list:
           marks a few more   a list of them,    copies the
           than k by bits     its k-th key       k largest

The kernels find out on the device whether the guess that `mark` used was good. The host waits once,
for that and the number of entries. If the guess was bad, as in a first step, the vector is searched
for the k-th key itself, and marked by that:

    search x levels      remark           collect
          |                 |                |
    finds the k-th key   marks exactly k   copies them
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from ...vector import (
    Array,
    Gradient,
    Located,
    Momentum,
    SparseVector,
    gradient_parts,
    index_dtype,
    require_selectable,
)
from .machine import Machine, Scratch, blocks_for, ceil_divide, located, parts_table
from .source import instance

# The sizes of the structs `Search` and `Tally` of search.cuh, in words.
SEARCH_WORDS: Final = 14  # uint64; the first three are the outcome: kept, next guess, dense
OUTCOME_WORDS: Final = 3
TALLY_WORDS: Final = 2  # uint32
WARP: Final = 32  # threads
BINS: Final = 2048
# Contenders are the keys in the histogram bin of the k-th. For normal and Laplace distributions
# there are at most k / 400.
FEWEST_CONTENDERS: Final = 4096

# Histogram levels of 11 bits each until a bin is one key wide: keys have 31 or 63 bits.
LEVELS: Final = {np.dtype(np.float32): 3, np.dtype(np.float64): 6}

LONGEST: Final = 2**32 - 1  # tallies count in 32 bits
FROM_DEVICE: Final = float("nan")  # as a guess: use the one that the last search left on the device


class SearchResult(NamedTuple):
    """The result of a search.

    kept:      how many entries were selected.
    threshold: the next guess.
    dense:     the guess was bad, so the whole vector must be searched.
    """

    kept: int
    threshold: float
    dense: bool


class Addition(NamedTuple):
    """The gradient to add before the selection, as in `accumulate_and_select`.

    parts: the gradient's; None: nothing is added.
    into:  memory for the sum; None: it overwrites the vector.
    """

    parts: Located | None = None
    momentum: Momentum | None = None
    weight: float = 1.0
    into: Array | None = None


def accumulate_and_select(
    scratch: Scratch,
    residual: Array,
    gradient: Gradient,
    k: int,
    threshold: float = 0.0,
    momentum: Momentum | None = None,
    weight: float = 1.0,
    into: Array | None = None,
) -> tuple[SparseVector, float]:
    """Add a gradient to `residual` (in place if `into` is None), and select from the sum."""
    parts = gradient_parts(residual, gradient, k, momentum, into)
    locations, kept_alive = located(scratch.machine, parts)
    found = _select(scratch, residual, k, threshold, Addition(locations, momentum, weight, into))
    del kept_alive  # may be freed before the kernels run: the pool reuses it in stream order
    return found


def select(
    scratch: Scratch, dense: Array, k: int, threshold: float = 0.0
) -> tuple[SparseVector, float]:
    """Return the k largest entries of `dense` and a threshold for the next search."""
    require_selectable(dense, k)
    return _select(scratch, dense, k, threshold, Addition())


def _select(
    scratch: Scratch, dense: Array, k: int, threshold: float, addition: Addition
) -> tuple[SparseVector, float]:
    machine = scratch.machine
    chosen = SparseVector(
        machine.empty(k, index_dtype(dense.size)), machine.empty(k, dense.dtype), dense.size
    )
    memory = buffers(scratch, dense.size, k, dense.dtype)
    guess = threshold if threshold > 0.0 else 0.0  # not NaN, which would mean FROM_DEVICE
    request, table = prepare(scratch, guess, addition)
    launch_selection(machine, memory, dense, k, chosen, request, table, addition)
    return finish(machine, memory, dense if addition.into is None else addition.into, chosen)


class ListSearch(NamedTuple):
    """The device memory of a search in a list of m entries."""

    search: Array  # uint64 [SEARCH_WORDS]
    histogram: Array  # uint32 [BINS]
    tallies: Array  # uint32 [TALLY_WORDS]: for each tile of the list
    groups: Array  # uint32 [TALLY_WORDS]: for each group of the list's tiles
    indices: Array  # [m]
    values: Array  # [m]


class Buffers(NamedTuple):
    """The device memory of one selection: for the pass over the vector, and for the candidates."""

    bits: Array  # uint32: one bit for each element, padded to whole tiles
    tallies: Array  # uint32 [TALLY_WORDS]: for each tile of the vector
    groups: Array  # uint32 [TALLY_WORDS]: for each group of the vector's tiles
    contenders: Array  # uint32: positions in the list
    candidates: ListSearch


def buffers(scratch: Scratch, length: int, k: int, dtype: np.dtype[Any]) -> Buffers:
    """Return the memory for selecting k entries from `length` elements."""
    if length > LONGEST:
        raise ValueError(f"a GPU selects from at most {LONGEST} elements, got {length}")
    threads = scratch.machine.threads
    # A good guess gives about 2.2 k candidates; at most 5 k were seen in training.
    capacity = min(length, 8 * k + 4096)
    tiles, list_tiles = _tiles(length, threads), ceil_divide(capacity, threads)

    def tallies(name: str, count: int) -> Array:
        return scratch.array(name, TALLY_WORDS * count, np.uint32)

    candidates = ListSearch(
        scratch.array("search", SEARCH_WORDS, np.uint64),
        scratch.array("histogram", BINS, np.uint32),
        tallies("list tallies", list_tiles),
        tallies("list groups", ceil_divide(list_tiles, threads)),
        scratch.array("list", capacity, index_dtype(length)),
        scratch.array("list", capacity, dtype),
    )
    return Buffers(
        scratch.array("bits", tiles * threads, np.uint32),
        tallies("tallies", tiles),
        tallies("groups", ceil_divide(tiles, threads)),
        scratch.array("contenders", max(FEWEST_CONTENDERS, capacity // 16), np.uint32),
        candidates,
    )


def _tiles(length: int, threads: int) -> int:
    return ceil_divide(length, 32 * threads)


def prepare(scratch: Scratch, guess: float, addition: Addition) -> tuple[Array, Array | None]:
    """Return a selection's request and its table of parts, in device memory.

    They are copied there only if they changed. A captured graph reads them anew each time.
    """
    momentum, parts = addition.momentum, addition.parts
    factor = 0.0 if momentum is None else momentum.factor
    request = scratch.written("request", np.array([addition.weight, factor, guess], np.float64))
    return request, None if parts is None else parts_table(scratch, "table", parts)


def launch_selection(
    machine: Machine,
    memory: Buffers,
    dense: Array,
    k: int,
    chosen: SparseVector,
    request: Array,
    table: Array | None,
    addition: Addition,
) -> None:
    """Launch the kernels that write the k largest entries to `chosen`, [k], if the guess is good.

    `finish` waits for them, and returns the result.
    """
    n, real = dense.size, dense.dtype
    parts, momentum = addition.parts, addition.momentum
    candidates, tiles = memory.candidates, _tiles(n, machine.threads)
    sources = 0 if parts is None else 1 if momentum is None else 2
    velocity = None if momentum is None else momentum.velocity
    into = None if momentum is None else momentum.into
    _begin(machine, candidates, memory.groups, k, 0, request)
    machine.launch(
        instance("mark", real, real if parts is None else parts.dtype, sources),
        min(machine.blocks, tiles),
        dense,
        dense if addition.into is None else addition.into,
        velocity,
        velocity if into is None else into,
        table,
        np.uint32(0 if parts is None else len(parts.sizes)),
        request,
        np.uint64(n),
        candidates.search,
        candidates.histogram,
        memory.bits,
        memory.tallies,
        memory.groups,
        candidates.tallies,
        np.uint32(candidates.tallies.size // TALLY_WORDS),
    )
    machine.launch(
        instance("expand", real, chosen.indices.dtype),
        min(machine.blocks, ceil_divide(tiles, machine.threads // WARP)),  # a tile a warp
        dense if addition.into is None else addition.into,
        candidates.search,
        np.uint64(tiles),
        memory.bits,
        memory.tallies,
        memory.groups,
        candidates.indices,
        candidates.values,
        memory.contenders,
        np.uint32(memory.contenders.size),
        candidates.tallies,
        candidates.groups,
    )
    _split(machine, candidates, chosen.indices, chosen.values)


def finish(
    machine: Machine, memory: Buffers, dense: Array, chosen: SparseVector
) -> tuple[SparseVector, float]:
    """Return the selected entries and the next threshold; waits for the device.

    dense: the sum, all of which is searched if the guess was bad.
    """
    search = memory.candidates.search
    found = read_result(machine, search, dense.dtype)
    if found.dense:
        _launch_dense(machine, memory, dense, chosen)
        found = read_result(machine, search, dense.dtype)
    return chosen.take(slice(found.kept)), found.threshold


def _launch_dense(machine: Machine, memory: Buffers, dense: Array, chosen: SparseVector) -> None:
    """Search the whole vector, beginning with the range that `mark` has narrowed down, if any."""
    search, tiles = memory.candidates.search, _tiles(dense.size, machine.threads)
    blocks = min(machine.blocks, tiles)
    marks = (memory.bits, memory.tallies, memory.groups)
    _search(machine, search, memory.candidates.histogram, dense, over_list=False)
    machine.launch(
        instance("remark", dense.dtype), blocks, dense, np.uint64(dense.size), search, *marks
    )
    machine.launch(
        instance("collect", dense.dtype, chosen.indices.dtype),
        blocks,
        dense,
        search,
        np.uint64(tiles),
        *marks,
        chosen.indices,
        chosen.values,
    )


def launch_split(
    scratch: Scratch,
    list_indices: Array,
    list_values: Array,
    k: int,
    kept: SparseVector,
) -> Array:
    """Launch the kernels that copy a sorted list's k largest entries, without zeros, to `kept`."""
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
    _begin(machine, entries, groups, k, m, None)
    if k < m:  # otherwise all entries stay
        _search(machine, entries.search, entries.histogram, list_values, over_list=True)
    machine.launch(
        instance("count", list_values.dtype),
        blocks_for(machine, m),
        list_values,
        entries.search,
        entries.tallies,
        groups,
    )
    _split(machine, entries, kept.indices, kept.values)
    return entries.search


def _begin(
    machine: Machine, target: ListSearch, groups: Array, k: int, entries: int, request: Array | None
) -> None:
    """Clear the search and the groups' tallies; entries: how many the list has already."""
    machine.launch(
        instance("begin", target.values.dtype),
        1,
        target.search,
        target.histogram,
        groups,
        np.uint32(groups.size // TALLY_WORDS),
        np.uint64(k),
        np.uint64(target.indices.size),
        np.uint64(entries),
        request,
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


def _split(
    machine: Machine,
    source: ListSearch,
    kept_indices: Array,
    kept_values: Array,
) -> None:
    machine.launch(
        instance("split", source.values.dtype, source.indices.dtype),
        blocks_for(machine, source.values.size),
        source.indices,
        source.values,
        source.search,
        source.tallies,
        source.groups,
        kept_indices,
        kept_values,
    )


def read_result(machine: Machine, search: Array, real: np.dtype[Any]) -> SearchResult:
    """Return the result of a search: waits for the device, and copies 24 bytes to the host."""
    kept, key, dense = machine.fetch(search[:OUTCOME_WORDS]).tolist()
    # The next guess is a key: the bits of a |value|.
    bits = np.uint32 if real == np.float32 else np.uint64
    return SearchResult(kept, float(np.array(key, bits).view(real)), bool(dense))
