"""The wire's codes on a GPU: a message's checksum, checks of indices, and codes of values.

Function for function as in `reference_codes`, which has more: `packed` indices and `int8` values
are coded on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...vector import Array
from . import cuda, packing
from .machine import Scratch, blocks_for
from .source import instance

# As in checksum.cu: the bytes before the checksum at a message's beginning, and its own 8 bytes.
HEAD_BYTES: Final = 56
CHECKSUM_BYTES: Final = 8


def write_head(message: Array, head: Array) -> None:
    """Begin the message with these 56 bytes of the host, and the checksum. Waits for nothing."""
    write_head_with(cuda.scratch(message), message, head)


def read_head(message: Array) -> tuple[Array, int]:
    """Return the first 64 bytes, in the host's memory, and the checksum that belongs there.

    Waits for one copy.
    """
    return open_with(cuda.scratch(message), message)


def in_order(indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length. Waits for the answer."""
    return in_order_with(cuda.scratch(indices), indices, length)


def pack_blocks(indices: Array, length: int, out: Array) -> int:
    """Write the indices, int32 or int64 [k], into `out`, uint8. Waits for the blocks' counts."""
    return packing.pack_blocks(cuda.scratch(indices), indices, length, out)


def unpack_blocks(data: Array, count: int, length: int) -> tuple[Array, int]:
    """Return the indices, int32 or int64 [count], and how many bytes of `data` they took.

    Waits for the blocks' counts, and for the check of the indices' order.
    """
    scratch = cuda.scratch(data)
    indices, used = packing.unpack_blocks(scratch, data, count, length)
    if not in_order_with(scratch, indices, length):
        raise ValueError(f"indices must be strictly increasing, in 0..{length - 1}")
    return indices, used


def _value_code(
    name: str, pack_in: Callable[..., int], unpack_in: Callable[..., Array]
) -> tuple[Callable[..., int], Callable[..., Array]]:
    def pack(values: Array, out: Array) -> int:
        """Write values, float32 or float64 [k], into their bytes. Waits for their exponent."""
        return pack_in(cuda.scratch(values), name, values, out)

    def unpack(data: Array, count: int, exponent: int, dtype: Any) -> Array:
        """Return the values, of the dtype, [count]."""
        return unpack_in(cuda.scratch(data), name, data, count, exponent, dtype)

    return pack, unpack


pack_bf16, unpack_bf16 = _value_code("bf16", packing.pack_floats, packing.unpack_floats)
pack_fp16, unpack_fp16 = _value_code("fp16", packing.pack_floats, packing.unpack_floats)
pack_int4, unpack_int4 = _value_code("int4", packing.pack_few_bits, packing.unpack_few_bits)
pack_int3, unpack_int3 = _value_code("int3", packing.pack_few_bits, packing.unpack_few_bits)
pack_int2, unpack_int2 = _value_code("int2", packing.pack_few_bits, packing.unpack_few_bits)


def write_head_with(scratch: Scratch, message: Array, head: Array) -> None:
    """Do what `write_head` does."""
    message[:HEAD_BYTES] = scratch.machine.put(head)
    _launch_checksum(scratch, message, message[HEAD_BYTES : HEAD_BYTES + CHECKSUM_BYTES])


def open_with(scratch: Scratch, message: Array) -> tuple[Array, int]:
    """Do what `read_head` does."""
    machine, begins = scratch.machine, HEAD_BYTES + CHECKSUM_BYTES
    report = machine.empty(begins + CHECKSUM_BYTES, np.uint8)
    # Beside the checksum: the host then waits for one copy, not for two.
    report[:begins] = message[:begins]
    _launch_checksum(scratch, message, report[begins:])
    fetched = machine.fetch(report)
    return fetched[:begins], int(fetched[begins:].view(np.uint64)[0])


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


def in_order_with(scratch: Scratch, indices: Array, length: int) -> bool:
    """Do what `in_order` does."""
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
