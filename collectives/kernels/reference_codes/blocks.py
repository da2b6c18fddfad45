"""blocks: each index as its 16-bit offset in a block of 64Ki, and how many lie in each block.

    +----------------------+------------------------------+
    | offsets uint16 [k]   | blocks: bytes, see below     |
    +----------------------+------------------------------+

From block 0 on, up to the last that has entries: its count; a stretch of empty blocks is a 0 and
the stretch's length. Numbers take 7 bits a byte, the lowest first; bit 7 says that more follow:

    entries per block   3    0 0 0    200         bytes   03   00 03   C8 01

Beside it the check of indices that are sent as they are.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...vector import Array, index_dtype

BLOCK_BITS: Final = 16
_BLOCK: Final = 1 << BLOCK_BITS
_MOST_BYTES: Final = 7  # of a number: 2^49 blocks are more than 2^63 elements have


def blocks_capacity(count: int, length: int) -> int:
    """Return how many bytes `pack_blocks` takes at most."""
    # For each block with entries: a 0, the empty blocks before it, and its count of up to 2^16.
    return 2 * count + min(count, (length >> BLOCK_BITS) + 1) * (1 + _MOST_BYTES + 3)


def pack_blocks(indices: Array, length: int, out: Array) -> int:
    """Write the indices, int32 or int64 [k], into `out` (uint8)."""
    offsets = indices.astype(np.uint16).view(np.uint8)
    blocks = indices >> BLOCK_BITS
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    tail = write_runs(blocks[starts], np.diff(starts, append=blocks.size))
    out[: offsets.size] = offsets
    out[offsets.size : offsets.size + tail.size] = tail
    return offsets.size + tail.size


def write_runs(blocks: Array, counts: Array) -> Array:
    """Return the bytes behind the offsets, uint8 [m]; counts: the entries of each of `blocks`."""
    empty = np.diff(blocks, prepend=-1) - 1
    numbers = np.stack([np.zeros_like(empty), empty, counts], axis=1).astype(np.uint64)
    written = np.stack([empty > 0, empty > 0, counts > 0], axis=1)
    return _numbers_to_bytes(numbers[written])


def _numbers_to_bytes(numbers: Array) -> Array:
    """Return the numbers, uint64 [m], 7 bits a byte."""
    sizes = np.ones(numbers.size, np.intp)
    for place in range(1, _MOST_BYTES):
        sizes += numbers >= 1 << 7 * place
    ends = np.cumsum(sizes)
    content = np.empty(int(sizes.sum()), np.uint8)
    for place in range(_MOST_BYTES):
        longer = sizes > place
        septet = numbers[longer] >> 7 * place & 127
        more = 128 * (sizes[longer] > place + 1)
        content[(ends - sizes)[longer] + place] = septet + more.astype(np.uint64)
    return content


def unpack_blocks(data: Array, count: int, length: int) -> tuple[Array, int]:
    """Return the indices, int32 or int64 [count], and how many bytes of `data` they took."""
    dtype = index_dtype(length)
    if not count:
        return np.empty(0, dtype), 0
    if data.size < 2 * count:
        raise ValueError(f"{count} offsets take {2 * count} bytes, there are {data.size}")
    offsets = data[: 2 * count].view(np.uint16)
    blocks, counts, used = read_runs(data[2 * count :], count, length)
    indices = (np.repeat(blocks, counts) << BLOCK_BITS | offsets).astype(dtype)
    if not in_order(indices, length):
        raise ValueError(f"indices must be strictly increasing, in 0..{length - 1}")
    return indices, 2 * count + used


def read_runs(data: Array, count: int, length: int) -> tuple[Array, Array, int]:
    """Return the blocks with entries, their counts, int64 [m] both, and the number of bytes read.

    data: the bytes behind the offsets. Raises ValueError where they do not account for `count`
    entries.
    """
    ends = np.flatnonzero(data < 128) + 1
    sizes = np.diff(ends, prepend=0)
    numbers = _bytes_to_numbers(data, ends - sizes, sizes)
    marks = numbers == 0
    # Behind a mark a 0 is a stretch's length and no mark; a stretch of 0 is refused below.
    stretch = np.concatenate(([False], marks[:-1]))
    marks &= ~stretch
    # Cut to one too many, which is refused below: a false number must not make the totals wrap.
    counts = np.where(marks | stretch, 0, np.minimum(numbers, _BLOCK + 1))
    totals = np.cumsum(counts)
    # The counts end where all entries are accounted for: padding may follow.
    last = int(np.searchsorted(totals, count))
    if last == totals.size or totals[last] != count:
        raise ValueError(f"its blocks do not have {count} entries in all")
    numbers, marks, stretch = numbers[: last + 1], marks[: last + 1], stretch[: last + 1]
    if (sizes[: last + 1] > _MOST_BYTES).any() or (counts[: last + 1] > _BLOCK).any():
        raise ValueError("a number among its blocks' counts is too large")
    if (numbers[stretch] == 0).any():
        raise ValueError("a stretch of empty blocks has length 0")
    # In floats, which do not wrap.
    if np.where(stretch, numbers, 1).sum(dtype=np.float64) > (length >> BLOCK_BITS) + 1 + last:
        raise ValueError(f"its blocks go on beyond the {length} elements")
    steps = np.where(stretch, numbers, ~marks)
    blocks = np.cumsum(steps) - 1
    if blocks[-1] > (length - 1) >> BLOCK_BITS:
        raise ValueError(f"its blocks go on beyond the {length} elements")
    filled = counts[: last + 1] > 0
    return blocks[filled], counts[: last + 1][filled], int(ends[last])


def _bytes_to_numbers(data: Array, starts: Array, sizes: Array) -> Array:
    """Return the number that begins at each of `starts`, int64; wrong where it is too long."""
    numbers = np.zeros(starts.size, np.int64)
    for place in range(_MOST_BYTES):
        longer = sizes > place
        septets = data[starts[longer] + place].astype(np.int64) & 127
        numbers[longer] |= septets << 7 * place
    return numbers


def in_order(indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length."""
    if not indices.size:
        return True
    rising = bool((indices[1:] > indices[:-1]).all())
    return rising and bool(indices[0] >= 0 and indices[-1] < length)
