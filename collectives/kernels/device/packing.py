"""Codes indices and values for the wire on a GPU, into the bytes of `reference_codes`.

The host reads no entries. It waits for the blocks' counts, which it codes, and for the largest
|value|, to choose the power of two by which values are scaled.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...vector import Array, index_dtype
from ..reference_codes.blocks import BLOCK_BITS, read_runs, write_runs
from ..reference_codes.few_bits import BITS
from ..reference_codes.few_bits import BLOCK as SCALED
from ..reference_codes.floats import rounds_to_infinity
from ..reference_codes.scale import common_exponent, exponent_range, scale_factors
from .machine import Scratch, blocks_for, ceil_divide
from .source import instance

BLOCK: Final = 1 << BLOCK_BITS

# The wire's names of the 16-bit floats, and the dtypes of their bits.
NARROW: Final = {"bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16)}

_NOTHING: Final = 1 << 16  # bits that no 16-bit float has


def pack_blocks(scratch: Scratch, indices: Array, length: int, out: Array) -> int:
    """Write the indices, int32 or int64 [k], into `out` (uint8); return the bytes taken."""
    machine, blocks, count = scratch.machine, ceil_divide(length, BLOCK), indices.size
    if not count:
        return 0
    machine.launch(
        instance("pack_offsets", indices.dtype),
        blocks_for(machine, count),
        indices,
        np.uint64(count),
        out[: 2 * count].view(np.uint16),
    )
    counts_of_blocks = machine.empty(blocks, np.uint32)
    machine.launch(
        instance("count_blocks", indices.dtype),
        blocks_for(machine, blocks),
        indices,
        np.uint64(count),
        counts_of_blocks,
        np.uint64(blocks),
    )
    counts = machine.fetch(counts_of_blocks)
    filled = np.flatnonzero(counts)
    tail = write_runs(filled, counts[filled])
    used = 2 * count + tail.size
    out[2 * count : used] = machine.put(tail)
    return used


def unpack_blocks(scratch: Scratch, data: Array, count: int, length: int) -> tuple[Array, int]:
    """Return the indices [count] and the bytes of `data` they took; their order is not checked.

    Raises ValueError where the blocks are not of `count` entries within the length.
    """
    machine = scratch.machine
    if data.size < 2 * count:
        raise ValueError(f"{count} offsets take {2 * count} bytes, there are {data.size}")
    indices = machine.empty(count, index_dtype(length))
    if not count:
        return indices, 0
    blocks, counts, used = read_runs(machine.fetch(data[2 * count :]), count, length)
    machine.launch(
        instance("unpack_offsets", indices.dtype),
        blocks_for(machine, count),
        data[: 2 * count].view(np.uint16),
        np.uint64(count),
        machine.put((np.cumsum(counts) - counts).astype(np.uint64)),
        machine.put(blocks.astype(np.uint64)),
        np.uint64(blocks.size),
        indices,
    )
    return indices, 2 * count + used


def pack_floats(scratch: Scratch, code: str, values: Array, out: Array) -> int:
    """Write the values, float32 or float64 [k], into uint8 [2 k]; return their exponent."""
    machine, narrow = scratch.machine, NARROW[code]
    exponent = common_exponent(code, _largest(scratch, values))
    beyond = rounds_to_infinity(code, exponent, values.dtype)
    if values.size:
        machine.launch(
            instance("round_values", narrow, values.dtype),
            blocks_for(machine, values.size),
            values,
            np.uint64(values.size),
            *scale_factors(-exponent, values.dtype),
            np.uint32(_NOTHING if beyond is None else beyond),
            out.view(narrow),
        )
    return exponent


def unpack_floats(
    scratch: Scratch, code: str, data: Array, count: int, exponent: int, dtype: Any
) -> Array:
    """Return the values, of the dtype, [count]."""
    machine, narrow = scratch.machine, NARROW[code]
    values = machine.empty(count, dtype)
    if count:
        machine.launch(
            instance("widen_values", narrow, values.dtype),
            blocks_for(machine, count),
            data.view(narrow),
            np.uint64(count),
            *scale_factors(exponent, values.dtype),
            values,
        )
    return values


def pack_few_bits(scratch: Scratch, code: str, values: Array, out: Array) -> int:
    """Write the values, float32 or float64 [k], into uint8 [few_bits_bytes(code, k)].

    Returns their exponent.
    """
    machine, blocks = scratch.machine, ceil_divide(values.size, SCALED)
    exponent = common_exponent(code, _largest(scratch, values))
    if values.size:
        machine.launch(
            instance("pack_few_bits", values.dtype, BITS[code]),
            min(machine.blocks, blocks),
            values,
            np.uint64(values.size),
            np.int32(exponent),
            np.int32(exponent_range(code, values.dtype).start),
            out[:blocks],
            out[blocks:],
        )
    return exponent


def unpack_few_bits(
    scratch: Scratch, code: str, data: Array, count: int, exponent: int, dtype: Any
) -> Array:
    """Return the values, of the dtype, [count]."""
    machine, blocks = scratch.machine, ceil_divide(count, SCALED)
    values = machine.empty(count, dtype)
    if count:
        machine.launch(
            instance("unpack_few_bits", values.dtype, BITS[code]),
            blocks_for(machine, count),
            data[:blocks],
            data[blocks:],
            np.uint64(count),
            np.int32(exponent),
            values,
        )
    return values


def _largest(scratch: Scratch, values: Array) -> Array:
    """Return the largest |value| in the host's memory, [1], or [0] where there is none."""
    machine = scratch.machine
    if not values.size:
        return np.empty(0, values.dtype)
    key = machine.zeros(1, np.uint64)
    machine.launch(
        instance("find_largest", values.dtype),
        blocks_for(machine, values.size),
        values,
        np.uint64(values.size),
        key,
    )
    # The kernel finds keys, which are the bits of |value|, as integers have a maximum on a GPU.
    bits = np.uint32 if values.dtype == np.float32 else np.uint64
    return machine.fetch(key).astype(bits).view(values.dtype)
