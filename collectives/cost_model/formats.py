"""Formats: how many bytes the messages of each wire format take, and which formats there are."""

from __future__ import annotations

import math
from typing import Final

from ..vector import index_dtype
from ..wire import EXACT, HEADER_BYTES, WHOLE, Format
from ..wire.indices import INDEX_CODES
from ..wire.values import VALUE_CODES

FORMATS: Final = tuple(Format(indices, values) for indices in INDEX_CODES for values in VALUE_CODES)

_BLOCK: Final = 1 << 16
_LONG: Final = 1 << 7  # numbers that take another byte in blocks are as many times as large
# What Rice codes take above the entropy of uniform positions: bits an entry, and their padding.
_ABOVE_ENTROPY_BITS: Final = 0.2
_RICE_PADDING_BYTES: Final = 24
# Of equal gaps, their worst: bits an entry above those of a gap, and a width for 64 entries; and of
# four parts that are padded, after a first gap that is long.
_ABOVE_GAP_BITS: Final = 2.0 + 8 / 64
_MOST_RICE_PADDING_BYTES: Final = 40


def message_bytes(
    entries: int, length: int, format: Format = EXACT, value_bytes: int = 4, parts: int = 1
) -> float:
    """Return the bytes of a message: exact for raw indices, else expected.

    Expected for positions spread evenly over one of so many parts of the length; those of a real
    gradient cluster, and take less packed.
    """
    if format.indices == WHOLE:
        indices = 0.0
    elif format.indices == "raw":
        indices = float(entries * index_dtype(length).itemsize)
    elif format.indices == "blocks":
        blocks = math.ceil(length / parts / _BLOCK)
        indices = 2.0 * entries + _expected_count_bytes(entries, blocks)
    else:
        bits = entropy_bits(entries * parts / length) + _ABOVE_ENTROPY_BITS
        indices = entries * bits / 8 + _RICE_PADDING_BYTES
    return _with_values(indices, entries, format, value_bytes)


def most_message_bytes(
    entries: int, length: int, format: Format = EXACT, value_bytes: int = 4, parts: int = 1
) -> float:
    """Return what no message exceeds, wherever its entries lie in one of so many parts.

    Nor do several together, of as many entries on average, in parts that are as large on average.
    Packed this holds where no gap is many times as long as the 64 around it, as clusters' are: they
    take less, unless they are made to take more.
    """
    if format.indices == WHOLE:
        indices = 0.0
    elif format.indices == "raw":
        indices = float(entries * index_dtype(length).itemsize)
    elif format.indices == "blocks":
        blocks = length / _BLOCK + 1
        # A part may begin inside a block, and there are empty ones before it.
        in_part = blocks if parts == 1 else blocks / parts + 2
        indices = 2.0 * entries + _most_count_bytes(entries, in_part, blocks)
    else:
        bits = math.log2(max(1.0, length / parts / max(1, entries))) + _ABOVE_GAP_BITS
        indices = entries * bits / 8 + _MOST_RICE_PADDING_BYTES
    return _with_values(indices, entries, format, value_bytes)


def _with_values(index_bytes: float, entries: int, format: Format, value_bytes: int) -> float:
    code = VALUE_CODES[format.values]
    element = code.element_bytes(value_bytes)
    padded = math.ceil(index_bytes / element) * element
    return HEADER_BYTES + padded + code.size_bytes(entries, value_bytes)


def _expected_count_bytes(entries: int, blocks: int) -> float:
    """Return what says how many entries each block has, where they are spread evenly.

    A count for each block that has some; a mark and a length for each stretch that has none.
    """

    def empty(those: int) -> float:
        """Return the chance that so many blocks have no entries."""
        return max(0.0, 1.0 - those / blocks) ** entries

    def stretches(least: int) -> float:
        """Return how many of at least so many blocks lie before one that has entries."""
        return max(0, blocks - least) * (empty(least) - empty(least + 1))

    count_bytes = 1 if entries < _LONG * blocks else 2
    counts = count_bytes * blocks * (1.0 - empty(1))
    return counts + 2 * stretches(1) + stretches(_LONG)


def _most_count_bytes(entries: int, in_part: float, blocks: float) -> float:
    """Return the most that it takes: every second block has entries, and some have many."""
    most = 3.0 * min(entries, in_part / 2)
    many, longer = float(_LONG), blocks / _LONG
    while many <= _BLOCK:
        most += min(in_part, entries / many)
        many *= _LONG
    while longer >= 1:
        most += min(entries, longer)
        longer /= _LONG
    return most


def entropy_bits(density: float) -> float:
    """Return the bits that the position of an entry takes at the least: H(density) / density."""
    if not 0.0 < density < 1.0:
        return 0.0
    rest = 1.0 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density
