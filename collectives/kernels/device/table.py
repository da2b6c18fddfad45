"""The table of a vector's parts, `Part` of parts.cuh: where each begins, and its address."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ...vector import Array
from ..gradients import Located
from .machine import Machine, Scratch


def located(machine: Machine, parts: Sequence[Array] | Located) -> tuple[Located, Sequence[Array]]:
    """Return where the parts lie, and the arrays that must stay alive for it, copies among them."""
    if isinstance(parts, Located):
        return parts, ()
    parts = [machine.packed(part) for part in parts]
    addresses = tuple(machine.address(part) for part in parts)
    return Located(parts[0].dtype, addresses, tuple(part.size for part in parts)), parts


def parts_table(scratch: Scratch, name: str, parts: Located) -> Array:
    """Return where each part begins in the vector, and its address: uint64 [2 * parts].

    In scratch memory of that name; sent to the device only where it is not what it was.
    """
    starts = accumulate(parts.sizes, initial=0)
    table = [number for pair in zip(starts, parts.addresses, strict=False) for number in pair]
    return scratch.written(name, np.array(table, np.uint64))
