"""Lots: a sorted list in equal parts; where each ends says much of the whole in few numbers."""

from __future__ import annotations

import numpy as np

from ..vector import Array


def lot_ends(entries: int, lots: int) -> list[int]:
    """Return where the lots of a list end: as equal as can be, none empty."""
    lots = min(lots, entries)
    return [entries * (lot + 1) // lots for lot in range(lots)]


def at_positions(array: Array, positions: list[int]) -> Array:
    """Return the elements at these positions, in the host's memory."""
    elements = array.take(positions).tolist() if positions else []
    return np.array(elements, array.dtype)
