"""Index codes in NumPy: the specification of their twins, and the fallback without them.

blocks: each index as its 16-bit offset in a block of 64Ki, and the count of entries in each block.

    +----------------------+------------------------------+
    | offsets uint16 [k]   | counts: bytes, see below     |
    +----------------------+------------------------------+

The counts of all blocks up to the last with entries. A run of empty blocks is a 0 and the run's
length. Numbers are LEB128: 7 bits a byte, the lowest first; bit 7 says that more follow:

    entries per block   3    0 0 0    200         bytes   03   00 03   C8 01

rice: the gaps between indices as Rice codes, near the entropy bound, in groups of 64 entries.

    gap = index - previous index - 1 = quotient * 2^width + rest

    +-------------+-------------------------+------------------+---------------+
    | widths      | rests: `width` bits for | quotients: unary | escapes       |
    | uint8 [g]   | each entry, by groups   |                  | uint32/64 [e] |
    +-------------+-------------------------+------------------+---------------+

    quotients   2 0 1 -> bits 001 1 01, the first bit lowest; 16 zeros and a one: the quotient is
                16 + the next of the escapes, which are as wide as an index
    padding     each part is padded with zeros to 8 bytes; so a full group's rests, 64 * width
                bits, begin at a 64-bit word

The textbook has one stream of bits (Rice & Plaunt 1971; a width for each group is their "adaptive"
variant). With two, unary bits are decoded by counting zeros in a word, and rests by shifts that are
known beforehand. A width for each group suits selections that cluster by layers; escapes prevent
that the gap from one layer to the next widens a whole group.

`pack_indices` writes into a buffer of at least `index_capacity` bytes. `unpack_indices` reads bytes
from any sender; a ValueError says what is wrong with them.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from ..vector import Array, index_dtype

BLOCK_BITS: Final = 16
_BLOCK: Final = 1 << BLOCK_BITS
_MOST_BYTES: Final = 7  # of a number: 49 bits, for vectors of up to 2^63 elements


def _blocks_capacity(count: int, length: int) -> int:
    """Return how many bytes `_pack_blocks` takes at most."""
    # For each block with entries: a 0, the length of a run before it, and a count of up to 2^16.
    return 2 * count + min(count, (length >> BLOCK_BITS) + 1) * (1 + _MOST_BYTES + 3)


def _pack_blocks(indices: Array, length: int, out: Array) -> int:
    """Write the indices, int32 or int64 [k], into `out` (uint8)."""
    offsets = indices.astype(np.uint16).view(np.uint8)
    blocks = indices >> BLOCK_BITS
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    tail = write_runs(blocks[starts], np.diff(starts, append=blocks.size))
    out[: offsets.size] = offsets
    out[offsets.size : offsets.size + tail.size] = tail
    return offsets.size + tail.size


def write_runs(blocks: Array, counts: Array) -> Array:
    """Return the bytes after the offsets, uint8 [m]; counts: the entries in each of `blocks`."""
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


def _unpack_blocks(data: Array, count: int, length: int) -> tuple[Array, int]:
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

    data: the bytes after the offsets. Raises ValueError unless they account for `count` entries.
    """
    ends = np.flatnonzero(data < 128) + 1
    sizes = np.diff(ends, prepend=0)
    numbers = _bytes_to_numbers(data, ends - sizes, sizes)
    marks = numbers == 0
    # A 0 after a mark is a run's length and not a mark. (That is refused below.)
    runs = np.concatenate(([False], marks[:-1]))
    marks &= ~runs
    # Clip to a value that is refused below: huge numbers must not make the totals wrap.
    counts = np.where(marks | runs, 0, np.minimum(numbers, _BLOCK + 1))
    totals = np.cumsum(counts)
    # The counts end once all entries are accounted for; padding may follow.
    last = int(np.searchsorted(totals, count))
    if last == totals.size or totals[last] != count:
        raise ValueError(f"its blocks do not have {count} entries in all")
    numbers, marks, runs, counts = (array[: last + 1] for array in (numbers, marks, runs, counts))
    if (sizes[: last + 1] > _MOST_BYTES).any() or (counts > _BLOCK).any():
        raise ValueError("a number among its blocks' counts is too large")
    if (numbers[runs] == 0).any():
        raise ValueError("a stretch of empty blocks has length 0")
    # In floats, which do not wrap.
    if np.where(runs, numbers, 1).sum(dtype=np.float64) > (length >> BLOCK_BITS) + 1 + last:
        raise ValueError(f"its blocks go on beyond the {length} elements")
    blocks = np.cumsum(np.where(runs, numbers, ~marks)) - 1
    if blocks[-1] > (length - 1) >> BLOCK_BITS:
        raise ValueError(f"its blocks go on beyond the {length} elements")
    filled = counts > 0
    return blocks[filled], counts[filled], int(ends[last])


def _bytes_to_numbers(data: Array, starts: Array, sizes: Array) -> Array:
    """Return the number that begins at each of `starts`, int64; wrong if over _MOST_BYTES."""
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


GROUP: Final = 64
ESCAPE: Final = 16
WIDEST: Final = 52  # 64 gaps of this width without escapes, added to any index, stay below 2^64
_WORD: Final = 8
_ROWS_AT_ONCE: Final = 1024  # a row of bits takes 64 bytes an entry


def _rice_capacity(count: int, length: int) -> int:
    """Return how many bytes `_pack_rice` takes at most."""
    # At the first width tried, the bit length of the mean gap, the quotients sum up to less than
    # the count, and at most 1/16 of them escape, with 64 bits. So an entry takes at most its rest,
    # a bit that ends the quotient, one unary bit and 64 / 16 bits of escapes.
    bits = length.bit_length() + 6 if length.bit_length() <= WIDEST else WIDEST + ESCAPE + 1 + 64
    return -(-count // GROUP) + -(-count * bits // 8) + 4 * _WORD


def _pack_rice(indices: Array, length: int, out: Array) -> int:
    """Write the indices, int32 or int64 [k], into `out` (uint8)."""
    escape_dtype = _escape_dtype(length)
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    groups, sizes = in_rows(gaps, GROUP), _group_sizes(gaps.size)
    widths = _widths(groups, sizes, 8 * escape_dtype.itemsize)
    quotients = (groups >> widths[:, None]).ravel()[: gaps.size]
    unary = np.zeros(int(np.minimum(quotients, ESCAPE).sum()) + gaps.size, np.bool_)
    unary[np.cumsum(np.minimum(quotients, ESCAPE) + 1) - 1] = True
    escapes = (quotients[quotients >= ESCAPE] - ESCAPE).astype(escape_dtype)
    parts = [
        widths.astype(np.uint8),
        _pack_rests(groups & ((1 << widths) - 1)[:, None], sizes, widths),
        np.packbits(unary, bitorder="little"),
        escapes.view(np.uint8),
    ]
    used = 0
    for part in parts:
        end = used + -(-part.size // _WORD) * _WORD
        out[used : used + part.size] = part
        out[used + part.size : end] = 0
        used = end
    return used


def _escape_dtype(length: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if index_dtype(length).itemsize == 4 else np.uint64)


def _group_sizes(count: int) -> Array:
    """Return how many of `count` entries are in each group."""
    rows = -(-count // GROUP)
    sizes = np.full(rows, GROUP)
    sizes[-1:] = count - GROUP * (rows - 1)
    return sizes


def _widths(groups: Array, sizes: Array, escape_bits: int) -> Array:
    """Return the width of each group: the mean's bit length, or less while that saves bits."""
    means = groups.sum(axis=1) // sizes
    # frexp rounds means from 2^53 on, but their widths are clipped to WIDEST anyway.
    widths = np.minimum(np.frexp(means.astype(np.float64))[1].astype(np.int64), WIDEST)
    rows = np.flatnonzero(widths)
    costs = _costs(groups[rows], sizes[rows], widths[rows], escape_bits)
    while rows.size:
        narrower = _costs(groups[rows], sizes[rows], widths[rows] - 1, escape_bits)
        better = narrower < costs
        rows, costs = rows[better], narrower[better]
        widths[rows] -= 1
        rows, costs = rows[widths[rows] > 0], costs[widths[rows] > 0]
    return widths


def _costs(groups: Array, sizes: Array, widths: Array, escape_bits: int) -> Array:
    """Return the bits of each group at these widths, without the ones that end its quotients."""
    quotients = groups >> widths[:, None]
    escaped = quotients >= ESCAPE
    unary = np.minimum(quotients, ESCAPE).sum(axis=1)
    return sizes * widths + unary + escape_bits * escaped.sum(axis=1)


def _pack_rests(rests: Array, sizes: Array, widths: Array) -> Array:
    """Return the rests of all groups as bytes; the last group takes no more words than it needs."""
    starts = np.cumsum(widths) - widths
    words = np.zeros((int(widths.sum()), _WORD), np.uint8)
    for rows, width in _groups_by_width(widths):
        bits = np.unpackbits(
            rests[rows].view(np.uint8).reshape(-1, _WORD), axis=1, bitorder="little", count=width
        )
        packed = np.packbits(bits.reshape(rows.size, -1), axis=1, bitorder="little")
        words[starts[rows][:, None] + np.arange(width)] = packed.reshape(-1, width, _WORD)
    return words[: _rest_words(sizes, widths)].ravel()


def _unpack_rests(data: Array, widths: Array) -> Array:
    """Return the rests, int64 [groups, GROUP]."""
    starts = np.cumsum(widths) - widths
    words = np.zeros((int(widths.sum()), _WORD), np.uint8)
    words.ravel()[: data.size] = data
    rests = np.zeros((widths.size, GROUP), np.int64)
    for rows, width in _groups_by_width(widths):
        packed = words[starts[rows][:, None] + np.arange(width)].reshape(rows.size, -1)
        bits = np.zeros((rows.size * GROUP, 64), np.uint8)
        bits[:, :width] = np.unpackbits(packed, axis=1, bitorder="little").reshape(-1, width)
        rests[rows] = np.packbits(bits, axis=1, bitorder="little").view(np.int64).reshape(-1, GROUP)
    return rests


def _groups_by_width(widths: Array) -> list[tuple[Array, int]]:
    """Return the groups of each width above 0, at most _ROWS_AT_ONCE at a time."""
    return [
        (rows[start : start + _ROWS_AT_ONCE], int(width))
        for width in np.unique(widths[widths > 0])
        for rows in [np.flatnonzero(widths == width)]
        for start in range(0, rows.size, _ROWS_AT_ONCE)
    ]


def _rest_words(sizes: Array, widths: Array) -> int:
    """Return how many words the rests take."""
    return int(widths[:-1].sum()) + int(-(-sizes[-1:] * widths[-1:] // 64).sum())


def _unpack_rice(data: Array, count: int, length: int) -> tuple[Array, int]:
    """Return the indices, int32 or int64 [count], and how many bytes of `data` they took."""
    dtype, escape_dtype = index_dtype(length), _escape_dtype(length)
    rows = -(-count // GROUP)
    words_from = -(-rows // _WORD) * _WORD
    if not count:
        return np.empty(0, dtype), 0
    if data.size < words_from:
        raise ValueError(f"{rows} widths take {words_from} bytes, there are {data.size}")
    widths = data[:rows].astype(np.int64)
    if widths.max() > WIDEST:
        raise ValueError(f"widths must lie in 0..{WIDEST}, got {widths.max()}")
    if data[rows:words_from].any():
        raise ValueError("the padding behind its widths is not zero")
    unary_from = words_from + _WORD * _rest_words(_group_sizes(count), widths)
    if data.size < unary_from:
        raise ValueError(f"its rests take {unary_from} bytes, there are {data.size}")
    # A quotient takes at least a bit. Check before allocating memory for a false count.
    if 8 * (data.size - unary_from) < count:
        raise ValueError(f"{data.size - unary_from} bytes do not hold its {count} quotients")
    rests = _unpack_rests(data[words_from:unary_from], widths).ravel()
    if rests[count:].any():
        raise ValueError("the padding behind its rests is not zero")

    quotients, unary_bytes = _read_unary(data[unary_from:], count)
    escapes_from = unary_from + unary_bytes
    escaped = np.flatnonzero(quotients == ESCAPE)
    escapes_to = escapes_from + escaped.size * escape_dtype.itemsize
    end = escapes_from + -(-escaped.size * escape_dtype.itemsize // _WORD) * _WORD
    if data.size < end:
        raise ValueError(f"its escapes end at byte {end}, there are {data.size}")
    if data[escapes_to:end].any():
        raise ValueError("the padding behind its escapes is not zero")
    width_of = np.repeat(widths, GROUP)[:count]
    escapes = data[escapes_from:escapes_to].view(escape_dtype).astype(np.uint64)
    # Compare by shifting right, as shifting a large quotient left would wrap.
    if (escapes > (length >> width_of[escaped]).astype(np.uint64)).any():
        raise ValueError(f"a gap is larger than the {length} elements")
    quotients[escaped] += escapes.astype(np.int64)
    steps = ((quotients << width_of) + rests[:count] + 1).astype(np.uint64)
    ends = np.cumsum(steps)
    # A step is hardly more than 2^63, so a sum that wraps is less than the one before.
    if (ends[1:] < ends[:-1]).any() or ends[-1] > length:
        raise ValueError(f"indices must lie in 0..{length - 1}")
    return (ends - np.uint64(1)).astype(dtype), end


def _read_unary(data: Array, count: int) -> tuple[Array, int]:
    """Return the quotients, int64 [count], and how many bytes their words take."""
    # The most bytes that valid quotients take; escapes may follow.
    most = -(-count * (ESCAPE + 1) // 64) * _WORD
    bits = np.unpackbits(data[:most], bitorder="little")
    ones = np.flatnonzero(bits)[:count]
    if ones.size < count:
        raise ValueError(f"it has {ones.size} quotients of {count}")
    words = int(ones[-1]) // 64 + 1
    if data.size < words * _WORD or bits[ones[-1] + 1 : words * 64].any():
        raise ValueError("the padding behind its quotients is not zero")
    quotients = np.diff(ones, prepend=-1) - 1
    if quotients.max() > ESCAPE:
        raise ValueError(f"quotients must lie in 0..{ESCAPE}, got {quotients.max()}")
    return quotients, words * _WORD


def in_rows(array: Array, width: int) -> Array:
    """Return the elements in rows of `width`, with zeros behind the last."""
    rows = np.zeros((-(-array.size // width), width), array.dtype)
    rows.ravel()[: array.size] = array
    return rows


@functools.lru_cache(maxsize=256)  # called with the same k step after step
def index_capacity(count: int, length: int, code: str) -> int:
    """Return how many bytes `pack_indices` takes at most; code: "blocks" or "rice"."""
    capacity = _blocks_capacity if code == "blocks" else _rice_capacity
    return capacity(count, length)


def pack_indices(indices: Array, length: int, out: Array, code: str) -> int:
    """Write indices, int32 or int64 [k], into `out` (uint8); return the bytes taken."""
    pack = _pack_blocks if code == "blocks" else _pack_rice
    return pack(indices, length, out)


def unpack_indices(data: Array, count: int, length: int, code: str) -> tuple[Array, int]:
    """Return the indices, int32 or int64 [count], and how many bytes of `data` they took."""
    unpack = _unpack_blocks if code == "blocks" else _unpack_rice
    return unpack(data, count, length)
