"""Index codes: sorted indices as bytes, and back, by name.

raw      int32, or int64 from 2^31 elements on: where links are faster than packing
blocks   16-bit offsets in blocks of 64Ki: half the bytes, at about the cost of a copy
packed   Rice codes of the gaps: near the entropy bound, for slow links

whole    nothing: every element of the vector is an entry (`algorithms.shards`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..kernels import codes
from ..vector import Array, index_dtype, module_of

USUAL_INDICES: Final = "blocks"  # the default of a Compression


class IndexCode(NamedTuple):
    """One way to write indices."""

    capacity: Callable[[int, int], int]  # (count, length) -> the most bytes it takes
    pack: Callable[[Array, int, Array], int]  # (indices, length, buffer) -> bytes taken
    # (bytes, count, length) -> indices, bytes taken; ValueError for anything else
    unpack: Callable[[Array, int, int], tuple[Array, int]]


def _raw_bytes(count: int, length: int) -> int:
    return count * index_dtype(length).itemsize


def _pack_raw(indices: Array, length: int, out: Array) -> int:
    size = indices.size * indices.itemsize
    out[:size].view(indices.dtype)[:] = indices
    return size


def _unpack_raw(data: Array, count: int, length: int) -> tuple[Array, int]:
    size = _raw_bytes(count, length)
    if data.size < size:
        raise ValueError(f"{count} indices take {size} bytes, there are {data.size}")
    indices = data[:size].view(index_dtype(length))
    # Kernels rely on that order: of a list that they write by they examine only the two ends.
    if not codes.in_order(indices, length):
        raise ValueError(f"its indices must be strictly increasing, in 0..{length - 1}")
    return indices, size


def _pack_whole(indices: Array, length: int, out: Array) -> int:
    if indices.size != length:
        raise ValueError(f"all {length} elements must be entries, got {indices.size}")
    return 0


def _unpack_whole(data: Array, count: int, length: int) -> tuple[Array, int]:
    if count != length:
        raise ValueError(f"it has {count} entries and must have all {length}")
    indices: Array = module_of(data).arange(length, dtype=index_dtype(length))
    return indices, 0


# The codes for sparse vectors.
INDEX_CODES: Final[dict[str, IndexCode]] = {
    "raw": IndexCode(_raw_bytes, _pack_raw, _unpack_raw),
    "blocks": IndexCode(codes.blocks_capacity, codes.pack_blocks, codes.unpack_blocks),
    "packed": IndexCode(codes.rice_capacity, codes.pack_rice, codes.unpack_rice),
}

WHOLE: Final = "whole"
# New codes go to the end, behind WHOLE: a code's place is its number in the header.
ALL_INDEX_CODES: Final = {
    **INDEX_CODES,
    WHOLE: IndexCode(lambda count, length: 0, _pack_whole, _unpack_whole),
}
