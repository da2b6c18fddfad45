"""order: are these indices strictly increasing, and in range?"""

from __future__ import annotations

from ...vector import Array


def in_order(indices: Array, length: int) -> bool:
    """Tell whether 0 <= indices[0] < indices[1] < ... < length."""
    if not indices.size:
        return True
    rising = bool((indices[1:] > indices[:-1]).all())
    return rising and bool(indices[0] >= 0 and indices[-1] < length)
