"""Quantiles: a sorted list in equal parts; where each ends tells much of it in few numbers."""

from __future__ import annotations

import numpy as np

from ..vector import Array


def quantile_ends(entries: int, quantiles: int) -> list[int]:
    """Return where the quantiles of a list end: as equal as can be, none empty."""
    quantiles = min(quantiles, entries)
    return [entries * (quantile + 1) // quantiles for quantile in range(quantiles)]


def at_positions(array: Array, positions: list[int]) -> Array:
    """Return the elements at these positions, in the host's memory."""
    elements = array.take(positions).tolist() if positions else []
    return np.array(elements, array.dtype)
