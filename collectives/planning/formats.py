"""Formats: how many bytes the messages of each wire format take, and which formats there are."""

from __future__ import annotations

import math
from typing import Final

from ..vector import index_dtype
from ..wire import EXACT, HEADER_BYTES, Format
from ..wire.indices import INDEX_CODES
from ..wire.values import VALUE_CODES

FORMATS: Final = tuple(Format(indices, values) for indices in INDEX_CODES for values in VALUE_CODES)

_BLOCK: Final = 1 << 16
# What Rice codes take above the entropy of uniform positions: bits an entry, and their padding.
_ABOVE_ENTROPY_BITS: Final = 0.2
_RICE_PADDING_BYTES: Final = 24


def message_bytes(entries: int, length: int, format: Format = EXACT, value_bytes: int = 4) -> float:
    """Return the bytes of a message: exact for raw indices, else expected.

    Expected for positions spread evenly; those of a real gradient cluster, and take less packed.
    """
    code = VALUE_CODES[format.values]
    if format.indices == "raw":
        indices = float(entries * index_dtype(length).itemsize)
    elif format.indices == "blocks":
        blocks = min(entries, math.ceil(length / _BLOCK))
        count_bytes = 1 if entries < 128 * blocks else 2
        indices = 2.0 * entries + count_bytes * blocks
    else:
        bits = entropy_bits(entries / length) + _ABOVE_ENTROPY_BITS
        indices = entries * bits / 8 + _RICE_PADDING_BYTES
    element = code.element_bytes(value_bytes)
    padded = math.ceil(indices / element) * element
    return HEADER_BYTES + padded + code.size_bytes(entries, value_bytes)


def entropy_bits(density: float) -> float:
    """Return the bits that the position of an entry takes at the least: H(density) / density."""
    if not 0.0 < density < 1.0:
        return 0.0
    rest = 1.0 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density
