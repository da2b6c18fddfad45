"""Alive: one bit for each entry of a list, whether its pick is part of the final result."""

from __future__ import annotations

import numpy as np

from ..vector import Array, module_of


def alive_bytes(count: int) -> int:
    """Return how many bytes the bits of `count` entries take."""
    return -(-count // 8)


def pack_alive(alive: Array) -> Array:
    """Return bool [m] as bits, uint8 [alive_bytes(m)]."""
    bits: Array = module_of(alive).packbits(alive)
    return bits


def unpack_alive(bits: Array, count: int) -> Array:
    """Return the first `count` bits as bool [count]."""
    alive: Array = module_of(bits).unpackbits(bits)[:count].view(np.bool_)
    return alive
