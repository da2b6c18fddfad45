"""Invented picks: what ranks might select, seeded, so that any rank can tell any other's.

    uniform     positions all over the vector, each rank's its own: hardly any two ranks agree
    clustered   half of a rank's positions come from runs of 64 that all ranks share, as those of
                the hot rows of a layer do: neighbours in position, and large on many ranks at once

Values are above a threshold, most of them near it, as those of a selection are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from collectives.vector import Array, SparseVector, index_dtype

RUN: Final = 64
# From here on a vector's positions are not shuffled to draw some of them: 8 bytes for each.
_LONG: Final = 1 << 26
Random = np.random.Generator


def picks(distribution: str, length: int, k: int, rank: int, seed: int) -> SparseVector:
    """Return what a rank selects: at most k entries of a vector of float32."""
    shared = np.random.default_rng([seed, length, k])
    own = np.random.default_rng([seed, length, k, rank + 1])
    indices = np.sort(DISTRIBUTIONS[distribution](length, k, shared, own))
    values = (1.0 + own.standard_exponential(indices.size)) * own.choice([-1.0, 1.0], indices.size)
    return SparseVector(indices.astype(index_dtype(length)), values.astype(np.float32), length)


def uniform(length: int, k: int, shared: Random, own: Random) -> Array:
    if length < _LONG or 4 * k > length:
        return own.choice(length, k, replace=False, shuffle=False)
    drawn = np.unique(own.integers(length, size=k))
    while drawn.size < k:  # some twice, a quarter of them at the most
        drawn = np.union1d(drawn, own.integers(length, size=k - drawn.size))
    return drawn


def clustered(length: int, k: int, shared: Random, own: Random) -> Array:
    runs = min(max(1, k // RUN), length // RUN)
    starts = RUN * shared.choice(max(1, length // RUN), runs, replace=False)
    hot = (starts[:, None] + np.arange(RUN)).reshape(-1)
    mine = own.choice(hot, min(k // 2, hot.size), replace=False)
    return np.union1d(mine, uniform(length, k - mine.size, shared, own))


DISTRIBUTIONS: Final[dict[str, Callable[[int, int, Random, Random], Array]]] = {
    "uniform": uniform,
    "clustered": clustered,
}
