"""Approximate selectors by name, to compare the exact one with: (dense, k) -> about k entries.

How many they find is up to the data. `collectives.select` is exact, and takes less time than any of
them (docs/measured/selection.md).
"""

from __future__ import annotations

from typing import Final, Protocol

from ..vector import Array, SparseVector
from .gaussian import gaussian_k
from .mstopk import mstopk
from .sampled import sampled_dgc
from .sidco import sidco
from .threshold import fixed_threshold

__all__ = [
    "SELECTORS",
    "Selector",
    "fixed_threshold",
    "gaussian_k",
    "mstopk",
    "sampled_dgc",
    "sidco",
]


class Selector(Protocol):
    """What every selector is; `dense` is float32 or float64 [n], unchanged."""

    def __call__(self, dense: Array, k: int) -> SparseVector: ...


# fixed_threshold asks for a threshold in place of k.
SELECTORS: Final[dict[str, Selector]] = {
    "sampled-dgc": sampled_dgc,
    "gaussian-k": gaussian_k,
    "mstopk": mstopk,
    "sidco": sidco,
}
