"""Published approximate selectors, to compare the exact one with: (dense, k) -> about k entries.

How many entries they find depends on the data. They never select a NaN, and one NaN may make them
find nothing. `collectives.select` is exact, and faster than any of them
(docs/measured/selection.md). Each raises ValueError for what `select` refuses, such as k > n.

    fixed_threshold   every entry from a given |value| on, however many (Strom 2015)
    sampled_dgc       the sampled top-k of Deep Gradient Compression (Lin et al. 2018, section 3.1
                      and appendix)
    gaussian_k        the threshold that k entries of a normal distribution exceed (Shi et al.
                      2019, "Understanding Top-k Sparsification in Distributed Deep Learning",
                      algorithm 1)
    mstopk            a binary search for the threshold between mean and maximum (Shi et al. 2021,
                      "Towards Scalable Distributed Training of Deep Learning on Public Cloud
                      Clusters", algorithm 1)
    sidco             SIDCo-E: each stage fits an exponential to what exceeds the last threshold
                      (Abdelmoniem et al. 2021, "An Efficient Statistical-based Gradient Compression
                      Technique for Distributed Training Systems", algorithm 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Final

import numpy as np

from .kernels import select
from .vector import Array, SparseVector, index_dtype, require_selectable

CHUNK = 1 << 17


def fixed_threshold(dense: Array, threshold: float) -> SparseVector:
    """Return the nonzero entries with |value| >= threshold."""
    return above(dense, np.abs(dense), threshold)


def above(dense: Array, magnitudes: Array, threshold: float) -> SparseVector:
    """Return the nonzero entries with magnitudes >= threshold; magnitudes: |dense|."""
    indices = np.flatnonzero((magnitudes >= threshold) & (magnitudes > 0))
    return SparseVector(indices.astype(index_dtype(dense.size)), dense[indices], dense.size)


def count_above(magnitudes: Array, threshold: float) -> int:
    """Count the magnitudes >= threshold, in chunks that stay in cache."""
    return sum(
        int(np.count_nonzero(magnitudes[start : start + CHUNK] >= threshold))
        for start in range(0, magnitudes.size, CHUNK)
    )


SHARE = 0.01  # of the entries that are sampled; Lin et al. sample 0.1 % to 1 %
ROUNDS = 10  # of lowering the threshold, at most
FEWEST = 0.8  # the threshold is lowered, by this factor, while it finds fewer than FEWEST * k


def sampled_dgc(dense: Array, k: int) -> SparseVector:
    """Take the threshold from a strided sample, lower it while it finds too few; at most k."""
    require_selectable(dense, k)
    magnitudes = np.abs(dense)
    # Odd: an even stride would stay in a few columns of a matrix with rows of even length.
    stride = max(1, min(round(1 / SHARE), k // 2)) | 1
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
    # Selects among the found values, so the indices of `kept` are positions in `found`.
    kept, _ = select(found.values, k)
    return SparseVector(found.indices[kept.indices], kept.values, dense.size)


CORRECTIONS = 3


def gaussian_k(dense: Array, k: int) -> SparseVector:
    """Fit a normal distribution, and correct its threshold a few times by half."""
    require_selectable(dense, k)
    mean, deviation = float(dense.mean(dtype=np.float64)), float(dense.std(dtype=np.float64))
    # A distribution with deviation 0 has no quantiles, and k = n needs none.
    if deviation == 0.0 or k == dense.size:
        return above(dense, np.abs(dense), 0.0)
    # Half of k / n in each tail, as entries are selected by |value|.
    threshold = NormalDist(mean, deviation).inv_cdf(1 - k / dense.size / 2)
    magnitudes = np.abs(dense)
    for _ in range(CORRECTIONS):
        count = count_above(magnitudes, threshold)
        # As published: up to a third too few or too many are good enough.
        if count < 2 * k / 3:
            threshold *= 0.5
        elif count > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return above(dense, magnitudes, threshold)


PASSES = 30


def mstopk(dense: Array, k: int) -> SparseVector:
    """Search in PASSES passes; take entries just under the threshold to fill up to k."""
    require_selectable(dense, k)
    magnitudes = np.abs(dense)
    mean, highest = float(magnitudes.mean(dtype=np.float64)), float(magnitudes.max())
    low, high = 0.0, 1.0
    low_threshold, high_threshold = 0.0, highest
    for _ in range(PASSES):
        middle = (low + high) / 2
        threshold = mean + middle * (highest - mean)
        if count_above(magnitudes, threshold) <= k:
            high, high_threshold = middle, threshold
        else:
            low, low_threshold = middle, threshold
    certain = above(dense, magnitudes, high_threshold)
    # More than k only if more than k entries tie at the largest |value|, where the search begins.
    if certain.entries >= k:
        return certain.where(np.arange(certain.entries) < k)
    candidates = above(dense, magnitudes, low_threshold)
    added = np.flatnonzero(np.abs(candidates.values) < high_threshold)[: k - certain.entries]
    is_chosen = np.abs(candidates.values) >= high_threshold
    is_chosen[added] = True
    return candidates.where(is_chosen)


STAGES = 2
FIRST = 0.25  # share of the entries that should pass the first threshold


def sidco(dense: Array, k: int) -> SparseVector:
    """Fit an exponential in each stage; the shares that pass the stages multiply to k / n."""
    require_selectable(dense, k)
    magnitudes = np.abs(dense)
    share = k / dense.size
    first = max(FIRST, share)
    rest = (share / first) ** (1 / STAGES)
    # Of an exponential distribution the share exp(-t / mean) exceeds t.
    threshold = -float(magnitudes.mean(dtype=np.float64)) * math.log(first)
    exceeding = magnitudes
    for _ in range(STAGES):
        # What exceeds a threshold is exponentially distributed above it: fit the tail anew.
        exceeding = exceeding[exceeding > threshold]
        if not exceeding.size:
            break
        excess = float(exceeding.mean(dtype=np.float64)) - threshold
        threshold -= excess * math.log(rest)
    return above(dense, magnitudes, threshold)


# A selector takes `dense`, float32 or float64 [n], which it does not change, and k.
# fixed_threshold asks for a threshold in place of k.
SELECTORS: Final[dict[str, Callable[[Array, int], SparseVector]]] = {
    "sampled-dgc": sampled_dgc,
    "gaussian-k": gaussian_k,
    "mstopk": mstopk,
    "sidco": sidco,
}
