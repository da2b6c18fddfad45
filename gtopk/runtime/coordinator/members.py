"""Members: the ranks that have operations of their own, as one rank sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import Engine


@dataclass
class Members:
    """All ranks, or those of a process set.

    ranks:   their ranks in the world, in order.
    engine:  runs their operations; None where this rank is none of them.
    unnamed: counts their operations without a name.
    """

    ranks: Sequence[int]
    engine: Engine | None
    unnamed: Iterator[int] = field(default_factory=lambda: itertools.count(1))
