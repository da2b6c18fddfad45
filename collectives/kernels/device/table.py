"""The table of a vector's parts, `Part` of parts.cuh: where each begins, and its address."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...vector import Array
from .machine import Machine


def parts_table(machine: Machine, parts: Sequence[Array]) -> Array:
    """Return where each part begins in the vector, and its address: uint64 [2 * parts]."""
    starts = np.cumsum([0, *(part.size for part in parts)], dtype=np.uint64)
    table = np.empty((len(parts), 2), np.uint64)
    table[:, 0] = starts[:-1]
    table[:, 1] = [machine.address(part) for part in parts]
    return machine.put(table.reshape(-1))
