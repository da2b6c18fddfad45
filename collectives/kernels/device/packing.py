"""What goes on the wire, made on a GPU: 16-bit offsets, and values in 16 bits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...vector import Array, index_dtype
from .machine import Scratch, blocks_for, ceil_divide
from .source import instance

BLOCK: Final = 1 << 16


def pack_offsets(scratch: Scratch, indices: Array, length: int) -> tuple[Array, Array]:
    """Return how many indices lie in each block of 64Ki elements, and their offsets in it.

    Counts are uint32 [ceil(length / 64Ki)], offsets uint16 [k].
    """
    machine, blocks = scratch.machine, ceil_divide(length, BLOCK)
    counts = machine.empty(blocks, np.uint32)
    offsets = machine.empty(indices.size, np.uint16)
    machine.launch(
        instance("count_blocks", indices.dtype),
        blocks_for(machine, blocks),
        indices,
        np.uint64(indices.size),
        counts,
        np.uint64(blocks),
    )
    if indices.size:
        machine.launch(
            instance("pack_offsets", indices.dtype),
            blocks_for(machine, indices.size),
            indices,
            np.uint64(indices.size),
            offsets,
        )
    return counts, offsets


def unpack_offsets(scratch: Scratch, counts: Array, offsets: Array, length: int) -> Array:
    """Return the indices; `counts` must add up to the number of offsets."""
    machine = scratch.machine
    indices = machine.empty(offsets.size, index_dtype(length))
    if offsets.size:
        starts = (counts.cumsum(dtype=np.uint32) - counts).astype(np.uint32)
        machine.launch(
            instance("unpack_offsets", indices.dtype),
            blocks_for(machine, offsets.size),
            offsets,
            np.uint64(offsets.size),
            starts,
            np.uint64(counts.size),
            indices,
        )
    return indices


def round_values(scratch: Scratch, values: Array, dtype: Any) -> Array:
    """Return float32 values in 16 bits: float16, or bfloat16's bits as uint16."""
    narrow = scratch.machine.empty(values.size, dtype)
    return _cast(scratch, "round_values", values, narrow, narrow.dtype)


def widen_values(scratch: Scratch, narrow: Array) -> Array:
    """Return float16 values, or bfloat16's bits as uint16, as float32; exact."""
    values = scratch.machine.empty(narrow.size, np.float32)
    return _cast(scratch, "widen_values", narrow, values, narrow.dtype)


def _cast(scratch: Scratch, kernel: str, source: Array, to: Array, narrow: np.dtype[Any]) -> Array:
    if source.size:
        scratch.machine.launch(
            instance(kernel, narrow),
            blocks_for(scratch.machine, source.size),
            source,
            np.uint64(source.size),
            to,
        )
    return to
