"""Sampled top-k of Deep Gradient Compression (Lin et al. 2018, section 3.1 and appendix)."""

from __future__ import annotations

import numpy as np

from ..kernels import select
from ..vector import Array, SparseVector
from .threshold import above, count_above

SHARE = 0.01  # of the entries, in the sample
ROUNDS = 10
FEWEST = 0.8  # times k; under that the threshold is lowered


def sampled_dgc(dense: Array, k: int) -> SparseVector:
    """Take the threshold from a strided sample, lower it while it finds too few; at most k."""
    magnitudes = np.abs(dense)
    stride = max(1, min(round(1 / SHARE), k // 2)) | 1  # odd: rows have even lengths
    sample = magnitudes[::stride]
    rank = max(1, round(k * sample.size / dense.size))
    threshold = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    for _ in range(ROUNDS):
        if count_above(magnitudes, threshold) >= FEWEST * k:
            break
        threshold *= FEWEST
    found = above(dense, magnitudes, threshold)
    if found.entries <= k:
        return found
    kept, _ = select(found.values, k)
    return SparseVector(found.indices[kept.indices], kept.values, dense.size)
