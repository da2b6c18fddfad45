"""Options of a gtopk reduction, which all ranks must have in common besides k.

Growth: how many entries each round of merges keeps.

The paper keeps k in every round, so that k of up to P k picks survive. The last rounds may keep
more, up to growth * k in the very last, and half as many in each round before, never under k:

    growth = 4, 5 rounds     k     k     k    2k    4k     kept, and so sent in the next round

Doubling is as fast as a list can grow: the rounds that double drop nothing. What the last round
keeps is not sent any more, so these updates of 4k entries cost 6 k entries a rank where updates
of k cost 5 k; in general less than (log2 P + growth) k.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from ..vector import Array
from ..wire import EXACT, Format
from .conservation import PUT_BACK

# The default of Compression.gtopk: on a power of two ranks it sends no more bytes than 1 does.
USUAL_GROWTH: Final = 2.0


def check_growth(growth: float) -> None:
    """Raise ValueError unless lists can grow by this factor."""
    if not 1.0 <= growth < math.inf:
        raise ValueError(f"growth must be a number from 1 on, got {growth!r}")


def kept_sizes(k: int, growth: float, rounds: int, length: int) -> list[int]:
    """Return how many entries the merge of each round keeps; the same on every rank."""
    sizes = (round(growth * k / 2 ** (rounds - 1 - number)) for number in range(rounds))
    return [min(max(k, size), length) for size in sizes]


class GtopkOptions(NamedTuple):
    """The options of gtopk; equal on all ranks."""

    format: Format = EXACT
    growth: float = 1.0  # the last round keeps growth * k: wider updates for few more bytes
    put_back: str = "owners"  # or "spread": who gets what a merge drops

    def checked(self) -> GtopkOptions:
        """Return the options; raise ValueError where one is out of bounds."""
        check_growth(self.growth)
        if self.put_back not in PUT_BACK:
            raise ValueError(
                f"put_back must be one of {', '.join(PUT_BACK)}; got {self.put_back!r}"
            )
        return self

    def stamp(self) -> Array:
        """Return the options' bytes in a message, uint8 [0 or 1]: none by default.

        The header holds how many, k and the format: a peer with other options is told from it.
        """
        number = PUT_BACK.index(self.put_back)
        return np.array([number] if number else [], np.uint8)
