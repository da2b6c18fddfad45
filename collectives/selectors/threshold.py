"""Fixed threshold: every entry from a given |value| on, however many (Strom 2015)."""

from __future__ import annotations

import numpy as np

from ..vector import Array, SparseVector, index_dtype

CHUNK = 1 << 17


def fixed_threshold(dense: Array, threshold: float) -> SparseVector:
    """Return the nonzero entries whose |value| is not under the threshold."""
    return above(dense, np.abs(dense), threshold)


def above(dense: Array, magnitudes: Array, threshold: float) -> SparseVector:
    """Return the nonzero entries whose magnitude, known already, is not under the threshold."""
    indices = np.flatnonzero((magnitudes >= threshold) & (magnitudes > 0))
    return SparseVector(indices.astype(index_dtype(dense.size)), dense[indices], dense.size)


def count_above(magnitudes: Array, threshold: float) -> int:
    """Return how many magnitudes are not under the threshold, in chunks that stay in cache."""
    return sum(
        int(np.count_nonzero(magnitudes[start : start + CHUNK] >= threshold))
        for start in range(0, magnitudes.size, CHUNK)
    )
