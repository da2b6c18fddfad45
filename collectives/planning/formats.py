"""Formats: how many bytes the messages of each wire format take."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from ..vector import index_dtype
from ..wire import HEADER_BYTES


class Format(NamedTuple):
    """How indices and values are coded."""

    indices: str = "raw"
    values: str = "exact"


EXACT: Final = Format()

# Offsets of 16 bits in blocks of 2^16 elements, and how many entries each block has.
_BLOCK: Final = 1 << 16
# What the packed code takes above the entropy of uniform positions.
_PACKED_ABOVE_ENTROPY_BITS: Final = 0.6
_VALUE_BYTES: Final = {"bf16": 2.0, "fp16": 2.0, "int8": 1.0 + 1 / 64}


def message_bytes(entries: int, length: int, format: Format = EXACT, value_bytes: int = 4) -> float:
    """Return the bytes of a message: exact for raw indices and exact values, else expected.

    Expected for positions spread evenly; those of a real gradient cluster, and take less packed.
    """
    values = entries * _VALUE_BYTES.get(format.values, float(value_bytes))
    if format.indices == "raw":
        indices = float(entries * index_dtype(length).itemsize)
    elif format.indices == "blocks":
        indices = 2.0 * entries + 2.0 * math.ceil(length / _BLOCK)
    else:
        indices = entries * (entropy_bits(entries / length) + _PACKED_ABOVE_ENTROPY_BITS) / 8
    return HEADER_BYTES + indices + values


def entropy_bits(density: float) -> float:
    """Return the bits that the position of an entry takes at the least: H(density) / density."""
    if not 0.0 < density < 1.0:
        return 0.0
    rest = 1.0 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density
