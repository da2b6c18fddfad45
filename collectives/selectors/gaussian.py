"""Gaussian-k: the threshold that k entries of a normal distribution exceed.

Shi et al. 2019, "Understanding Top-k Sparsification in Distributed Deep Learning", algorithm 1.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from ..vector import Array, SparseVector
from .threshold import above, count_above

CORRECTIONS = 3


def gaussian_k(dense: Array, k: int) -> SparseVector:
    """Fit mean and deviation, and correct the threshold a few times by half."""
    mean, deviation = float(dense.mean(dtype=np.float64)), float(dense.std(dtype=np.float64))
    if deviation == 0.0 or k == dense.size:
        return above(dense, np.abs(dense), 0.0)
    threshold = NormalDist(mean, deviation).inv_cdf(1 - k / dense.size / 2)
    magnitudes = np.abs(dense)
    for _ in range(CORRECTIONS):
        count = count_above(magnitudes, threshold)
        if count < 2 * k / 3:
            threshold *= 0.5
        elif count > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return above(dense, magnitudes, threshold)
