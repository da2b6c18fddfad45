"""Balance: the update's entries, in index order, dealt out in equal blocks before the allgather.

    entries   region 0: 0 1 2 3 4 5   region 1: -   region 2: 6 7        6 + 0 + 2 entries, 3 blocks
    blocks    0: 0 1 | 1: 2 3 4 | 2: 5 6 7          region 0's owner sends 2 3 4 and 5

Block b goes to the owner of region b, so that where the regions are even little moves; and where
no region holds much more than its share nothing moves at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

# A largest part of so many times the mean is even enough: the allgather takes that much longer,
# and a move costs a message and the surplus.
_EVEN: Final = 1.25


def is_even(counts: Sequence[int]) -> bool:
    """Tell whether these parts can be gathered as they are."""
    return max(counts) * len(counts) <= max(_EVEN * sum(counts), len(counts))


def moves(counts: Sequence[int]) -> list[list[slice]]:
    """Return for each region and block the region's entries that belong to the block."""
    total, parts = sum(counts), len(counts)
    bounds = [total * block // parts for block in range(parts + 1)]
    plan = []
    start = 0
    for count in counts:
        inside = [min(max(bound - start, 0), count) for bound in bounds]
        plan.append([slice(a, b) for a, b in itertools.pairwise(inside)])
        start += count
    return plan
