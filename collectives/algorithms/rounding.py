"""Rounding: what coded values lose is put back, each error by exactly one rank."""

from __future__ import annotations

from ..vector import SparseVector
from ..wire import Format


def rounding_error(
    vector: SparseVector, rounded: SparseVector, format: Format, first: int = 0, step: int = 1
) -> SparseVector:
    """Return what the values lost: vector - rounded, at positions first, first + step, ...

    A list that `step` ranks hold alike loses the same on each of them, so each takes every
    step-th entry.
    """
    if format.values == "exact":
        return vector.at(slice(0))
    share = slice(first, None, step)
    return vector.at(share).minus(rounded.at(share))
