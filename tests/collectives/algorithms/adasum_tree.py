"""A reference Adasum that follows the definition: recursive, whole vectors, one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating]


def pair(a: Vector, b: Vector) -> Vector:
    """Combine two vectors in float64, and round to their dtype."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    x_weight = 1 - x @ y / (2 * (x @ x)) if x.any() else 1.0
    y_weight = 1 - x @ y / (2 * (y @ y)) if y.any() else 1.0
    return (x_weight * x + y_weight * y).astype(a.dtype)


def tree(vectors: Sequence[Vector]) -> Vector:
    """Combine the vectors by recursive halving; first fold those beyond a power of two."""
    if len(vectors) == 1:
        return vectors[0]
    power = 2 ** int(math.log2(len(vectors)))
    if power < len(vectors):
        folded = map(pair, vectors, vectors[power:])
        return tree([*folded, *vectors[len(vectors) - power : power]])
    return pair(tree(vectors[: power // 2]), tree(vectors[power // 2 :]))
