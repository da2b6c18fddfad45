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
    of_x = 1 - x @ y / (2 * (x @ x)) if x.any() else 1.0
    of_y = 1 - x @ y / (2 * (y @ y)) if y.any() else 1.0
    return (of_x * x + of_y * y).astype(a.dtype)


def tree(vectors: Sequence[Vector]) -> Vector:
    """Combine the vectors by recursive halving; first fold those beyond a power of two."""
    if len(vectors) == 1:
        return vectors[0]
    whole = 2 ** int(math.log2(len(vectors)))
    if whole < len(vectors):
        folded = map(pair, vectors, vectors[whole:])
        return tree([*folded, *vectors[len(vectors) - whole : whole]])
    return pair(tree(vectors[: whole // 2]), tree(vectors[whole // 2 :]))
