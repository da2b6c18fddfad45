"""MSTopK: a binary search for the threshold between the mean and the maximum.

Shi et al. 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters",
algorithm 1.
"""

from __future__ import annotations

import numpy as np

from ..vector import Array, SparseVector
from .threshold import above, count_above

PASSES = 30


def mstopk(dense: Array, k: int) -> SparseVector:
    """Search in PASSES passes; what is missing to k comes from just under the threshold."""
    magnitudes = np.abs(dense)
    mean, highest = float(magnitudes.mean(dtype=np.float64)), float(magnitudes.max())
    low, high = 0.0, 1.0
    too_many, enough = 0.0, highest
    for _ in range(PASSES):
        middle = (low + high) / 2
        threshold = mean + middle * (highest - mean)
        if count_above(magnitudes, threshold) <= k:
            high, enough = middle, threshold
        else:
            low, too_many = middle, threshold
    sure = above(dense, magnitudes, enough)
    if sure.entries >= k:
        return sure.where(np.arange(sure.entries) < k)
    nearly = above(dense, magnitudes, too_many)
    spare = np.flatnonzero(np.abs(nearly.values) < enough)[: k - sure.entries]
    chosen = np.abs(nearly.values) >= enough
    chosen[spare] = True
    return nearly.where(chosen)
