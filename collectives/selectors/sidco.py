"""SIDCo-E: thresholds of exponential fits, each to what exceeds the one before.

Abdelmoniem et al. 2021, "An Efficient Statistical-based Gradient Compression Technique for
Distributed Training Systems", algorithm 1.
"""

from __future__ import annotations

import math

import numpy as np

from ..vector import Array, SparseVector
from .threshold import above

STAGES = 2
FIRST = 0.25  # the share that is to pass the first stage


def sidco(dense: Array, k: int) -> SparseVector:
    """Fit the mean of the exceedances in each stage; the stages' shares multiply to k / n."""
    magnitudes = np.abs(dense)
    share = k / dense.size
    first = max(FIRST, share)
    rest = (share / first) ** (1 / STAGES)
    threshold = -float(magnitudes.mean(dtype=np.float64)) * math.log(first)
    exceeding = magnitudes
    for _ in range(STAGES):
        exceeding = exceeding[exceeding > threshold]
        if not exceeding.size:
            break
        excess = float(exceeding.mean(dtype=np.float64)) - threshold
        threshold -= excess * math.log(rest)
    return above(dense, magnitudes, threshold)
