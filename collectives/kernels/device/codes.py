"""The wire's codes on a GPU; they write the same bytes as the reference.

    a message   its first bytes and its checksum
    indices     16-bit offsets in blocks, and the check of their order
    values      16-bit floats, and integers of 2 to 4 bits

"rice" indices and "int8" values are coded on the host only. The host never reads the entries. It
waits for the blocks' counts, which it encodes, and for the largest |value|, which determines the
exponent.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...vector import Array, index_dtype
from ..reference_indices import BLOCK_BITS, read_runs, write_runs
from ..reference_values import (
    BITS,
    common_exponent,
    exponent_range,
    rounds_to_infinity,
    scale_factors,
)
from ..reference_values import BLOCK as SCALED
from .machine import Scratch, blocks_for, ceil_divide
from .source import instance

# The bytes of a message before its checksum, and the checksum's, as in checksum.cu.
HEAD_BYTES: Final = 56
CHECKSUM_BYTES: Final = 8
BLOCK: Final = 1 << BLOCK_BITS

# The wire's names of the 16-bit floats, and the dtypes of their bits.
NARROW: Final = {"bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16)}

_NOTHING: Final = 1 << 16  # matches the bits of no 16-bit float


def write_head(scratch: Scratch, message: Array, head: Array) -> None:
    """Write 56 bytes of the host and the checksum to the front of a message. Asynchronous."""
    message[:HEAD_BYTES] = scratch.machine.put(head)
    _launch_checksum(scratch, message, message[HEAD_BYTES : HEAD_BYTES + CHECKSUM_BYTES])


def read_head(scratch: Scratch, message: Array) -> tuple[Array, int]:
    """Return the first 64 bytes, in the host's memory, and the checksum that they should have.

    Waits for one copy.
    """
    machine, head_bytes = scratch.machine, HEAD_BYTES + CHECKSUM_BYTES
    # Both in one array, so that the host waits for a single copy.
    report = machine.empty(head_bytes + CHECKSUM_BYTES, np.uint8)
    report[:head_bytes] = message[:head_bytes]
    _launch_checksum(scratch, message, report[head_bytes:])
    fetched = machine.fetch(report)
    return fetched[:head_bytes], int(fetched[head_bytes:].view(np.uint64)[0])


def _launch_checksum(scratch: Scratch, message: Array, result: Array) -> None:
    machine = scratch.machine
    machine.launch(
        "checksum",
        blocks_for(machine, message.size, each=16),
        message,
        np.uint64(message.size),
        scratch.array("checksum", 1, np.uint64),
        scratch.array("ticket", 1, np.uint32),
        result,
    )


def in_order(scratch: Scratch, indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length. Waits for the result."""
    machine = scratch.machine
    if not indices.size:
        return True
    flag = machine.zeros(1, np.uint32)
    machine.launch(
        instance("find_disorder", indices.dtype),
        blocks_for(machine, indices.size),
        indices,
        np.uint64(indices.size),
        np.uint64(length),
        flag,
    )
    return not machine.fetch(flag).item()


def pack_indices(scratch: Scratch, indices: Array, length: int, out: Array, code: str) -> int:
    """Write the indices, int32 or int64 [k], into `out` (uint8); return the bytes taken.

    code: only "blocks". Waits for the blocks' counts.
    """
    assert code == "blocks"  # `wire.format.ON_DEVICE` has no other
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


def unpack_indices(
    scratch: Scratch, data: Array, count: int, length: int, code: str
) -> tuple[Array, int]:
    """Return the indices, int32 or int64 [count], and how many bytes of `data` they took.

    code: only "blocks". Waits for the blocks' counts, and for the check of the indices' order.
    """
    assert code == "blocks"  # as above
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
    if not in_order(scratch, indices, length):
        raise ValueError(f"indices must be strictly increasing, in 0..{length - 1}")
    return indices, 2 * count + used


def pack_values(scratch: Scratch, values: Array, out: Array, code: str) -> int:
    """Write values, float32 or float64 [k], into their bytes, uint8; return their exponent.

    Waits for the exponent.
    """
    exponent = common_exponent(code, _largest(scratch, values))
    if values.size:
        pack = _pack_few_bits if code in BITS else _pack_floats
        pack(scratch, code, values, exponent, out)
    return exponent


def _pack_floats(scratch: Scratch, code: str, values: Array, exponent: int, out: Array) -> None:
    machine, narrow = scratch.machine, NARROW[code]
    infinite_bits = rounds_to_infinity(code, exponent, values.dtype)
    machine.launch(
        instance("round_values", narrow, values.dtype),
        blocks_for(machine, values.size),
        values,
        np.uint64(values.size),
        *scale_factors(-exponent, values.dtype),
        np.uint32(_NOTHING if infinite_bits is None else infinite_bits),
        out.view(narrow),
    )


def _pack_few_bits(scratch: Scratch, code: str, values: Array, exponent: int, out: Array) -> None:
    machine, blocks = scratch.machine, ceil_divide(values.size, SCALED[code])
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


def unpack_values(
    scratch: Scratch, data: Array, count: int, exponent: int, dtype: Any, code: str
) -> Array:
    """Return the values, of the dtype, [count]."""
    values = scratch.machine.empty(count, dtype)
    if count:
        unpack = _unpack_few_bits if code in BITS else _unpack_floats
        unpack(scratch, code, data, exponent, values)
    return values


def _unpack_floats(scratch: Scratch, code: str, data: Array, exponent: int, values: Array) -> None:
    machine, narrow = scratch.machine, NARROW[code]
    machine.launch(
        instance("widen_values", narrow, values.dtype),
        blocks_for(machine, values.size),
        data.view(narrow),
        np.uint64(values.size),
        *scale_factors(exponent, values.dtype),
        values,
    )


def _unpack_few_bits(
    scratch: Scratch, code: str, data: Array, exponent: int, values: Array
) -> None:
    machine, blocks = scratch.machine, ceil_divide(values.size, SCALED[code])
    machine.launch(
        instance("unpack_few_bits", values.dtype, BITS[code]),
        blocks_for(machine, values.size),
        data[:blocks],
        data[blocks:],
        np.uint64(values.size),
        np.int32(exponent),
        values,
    )


def _largest(scratch: Scratch, values: Array) -> Array:
    """Return the largest |value| in the host's memory, [1]; [0] if there are no values."""
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
    # The kernel finds the largest key, the bits of |value|: atomicMax is for integers only.
    bits = np.uint32 if values.dtype == np.float32 else np.uint64
    return machine.fetch(key).astype(bits).view(values.dtype)
