"""Index codes: sorted indices as bytes, and back, by name.

raw      int32, or int64 from 2^31 elements on: where links are faster than packing
blocks   16-bit offsets in blocks of 64Ki: half the bytes, at about the cost of a copy
packed   Rice codes of the gaps: near the entropy bound, for slow links
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..kernels import codes
from ..vector import Array, index_dtype

USUAL_INDICES: Final = "blocks"  # of a Compression, unless one says otherwise


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
    if not codes.in_order(indices, length):
        raise ValueError(f"its indices must be strictly increasing, in 0..{length - 1}")
    return indices, size


INDEX_CODES: Final[dict[str, IndexCode]] = {
    "raw": IndexCode(_raw_bytes, _pack_raw, _unpack_raw),
    "blocks": IndexCode(codes.blocks_capacity, codes.pack_blocks, codes.unpack_blocks),
    "packed": IndexCode(codes.rice_capacity, codes.pack_rice, codes.unpack_rice),
}
