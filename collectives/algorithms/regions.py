"""Regions: divides the indices into a region for each rank, which adds up the picks in it.

    picks of      rank 0   .:.  .   . |   .   . |      ..     |  .      n = 40, P = 4
                  rank 1    ::    .   | .       |  .    .   . |    .
                  ...
    boundaries               0        12       19            33     40
    owners                   rank 1     rank 2     rank 3      rank 0

Boundaries lie where all ranks' picks together fall into equal parts, as far as quantiles tell: each
rank divides its picks into 4 P equal quantiles and tells where each ends. So each end of a region
is off by less than one quantile of every rank, a quarter of the region's fair share; by far less
where picks spread evenly within a quantile.
Regions are dealt to the ranks by the rotation that leaves most picks where they are.

The first step draws its boundaries from its own picks, before it sends any: it is as even as those
that follow. Picks hardly move from step to step, so boundaries serve many steps (Li and Hoefler
2022, section 3.1); all ranks learn how full the regions were, and draw new boundaries early when
one got too full.

Quantiles: a sorted list in equal parts; where each ends tells much of it in few numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import wire
from ..transports.transport import Transport
from ..vector import Array, SparseVector


def quantile_ends(entries: int, quantiles: int) -> list[int]:
    """Return the ends of a list's quantiles: as equal as can be, none empty."""
    quantiles = min(quantiles, entries)
    return [entries * (quantile + 1) // quantiles for quantile in range(quantiles)]


def at_positions(array: Array, positions: list[int]) -> Array:
    """Return the elements at these positions, in the host's memory."""
    elements = array.take(positions).tolist() if positions else []
    return np.array(elements, array.dtype)


QUANTILES_PER_RANK: Final = 4
_TOO_FULL: Final = 1.5  # times the entries of the fullest region when the boundaries were new


class Cut(NamedTuple):
    """The regions: bounds[r] <= index < bounds[r + 1] is region r, of rank owners[r]."""

    bounds: list[int]
    owners: list[int]


class Regions:
    """The boundaries in use, kept between steps; every rank keeps an equal copy.

    every: how many reductions use the same boundaries.
    """

    def __init__(self, every: int = 64) -> None:
        if every < 1:
            raise ValueError(f"boundaries must serve at least one step, got every={every}")
        self.every = every
        self._cut: Cut | None = None
        self._served = 0
        self._fullest = 1.0

    def record(self) -> dict[str, Any]:
        """Return the state for `resume`, as plain numbers and lists."""
        cut = None if self._cut is None else [self._cut.bounds, self._cut.owners]
        return {"cut": cut, "served": self._served, "fullest": self._fullest}

    def resume(self, record: Mapping[str, Any]) -> None:
        """Go on from a record; every rank from an equal one."""
        cut = record["cut"]
        self._cut = None if cut is None else Cut(list(cut[0]), list(cut[1]))
        self._served, self._fullest = int(record["served"]), float(record["fullest"])

    def agree(self, picks: SparseVector, transport: Transport) -> Cut:
        """Return the regions of this step; where they are due, new ones for these picks."""
        cut = self._cut
        # The same on all ranks, as each keeps an equal copy: none is in `estimate` alone.
        if (
            cut is None
            or self._served == self.every
            or (cut.bounds[-1], len(cut.owners)) != (picks.length, transport.size)
        ):
            cut = self._cut = estimate(picks, transport)
            self._served = 0
        self._served += 1
        return cut

    def note_loads(self, loads: Sequence[int]) -> None:
        """Take in how many entries each region got; one too full asks for new boundaries.

        It is compared with the load when the boundaries were new, not with an equal share: one
        index that all ranks pick cannot be divided.
        """
        fullest = max(loads) * len(loads) / max(1, sum(loads))
        if self._served == 1:
            self._fullest = max(1.0, fullest)
        elif fullest > _TOO_FULL * self._fullest:
            self._cut = None


def estimate(picks: SparseVector, transport: Transport) -> Cut:
    """Return regions of about equally many picks: one small allgather."""
    size, length = transport.size, picks.length
    ranks, points, weights = _gather_quantiles(picks, transport)
    total = int(weights.sum())
    if not total:
        bounds = [length * region // size for region in range(size + 1)]
    else:
        targets = total * np.arange(1, size) / size
        bounds = [0, *_ends(ranks, points, weights, targets), length]
    picked = np.zeros((size, size), np.int64)  # by rank and region
    # Right: an index that is a boundary belongs to the region that begins there.
    np.add.at(picked, (ranks, np.searchsorted(bounds[1:-1], points, side="right")), weights)
    everyone = np.arange(size)

    def stay(turn: int) -> tuple[int, int, int]:
        """Return how many picks stay on the rank with the fewest, and on all, by this rotation."""
        of_each = picked[everyone, (everyone - turn) % size]
        # First the rank on which the fewest stay: it sends the most, and the others wait for it.
        return int(of_each.min()), int(of_each.sum()), -turn

    turn = max(range(size), key=stay)
    return Cut(bounds, [(region + turn) % size for region in range(size)])


def _ends(ranks: Array, points: Array, weights: Array, targets: Array) -> list[int]:
    """Return, for each target (ascending), the index before which so many picks of all ranks lie.

    Of a quantile the last pick's index is known; the others are assumed to be evenly spread:
    a rank's picks up to an index are a line that bends and steps up where a quantile ends. The
    sum of these lines is walked from bend to bend, by single operations of float64, which every
    processor rounds alike.
    """
    begins = np.where(np.diff(ranks, prepend=-1) > 0, -1, np.roll(points, 1))
    slopes = (weights - 1) / (points - begins)
    bends = np.concatenate([begins, points])
    # Stable: the sorts of NumPy differ by processor in how they order equal bends, and all ranks
    # must come to the same boundaries.
    order = np.argsort(bends, kind="stable")
    bends, slope = bends[order], np.cumsum(np.concatenate([slopes, -slopes])[order])
    # The last pick of a quantile is where it is known to be: there the line steps up by one.
    steps = (order >= begins.size).astype(np.float64)
    passed = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(bends))]) + np.cumsum(steps)
    after = np.minimum(np.searchsorted(passed, targets), passed.size - 1)
    # A target within a stretch is met only at its end: go back along the slope, which is above zero
    # where the line has risen past the target.
    too_far = np.maximum(0.0, passed[after] - steps[after] - targets)
    back = np.divide(too_far, slope[after - 1], out=np.zeros_like(too_far), where=too_far > 0)
    back = np.clip(np.ceil(back), 0, bends[after] - bends[after - 1]).astype(np.int64)
    return [int(index) + 1 for index in bends[after] - back]


def _gather_quantiles(picks: SparseVector, transport: Transport) -> tuple[Array, Array, Array]:
    """Return rank, last index and size of every rank's quantiles, int64 [m] each.

    A message is a vector: at the last index of each quantile, how many picks are in it.
    """
    ends = quantile_ends(picks.entries, QUANTILES_PER_RANK * transport.size)
    lasts = at_positions(picks.indices, [end - 1 for end in ends])
    sizes = np.diff([0, *ends]).astype(picks.values.dtype)
    mine = SparseVector(lasts, sizes, picks.length)
    number = transport.begun
    # For k any number will do that is the same on all ranks.
    messages = transport.allgather(wire.encode(mine, QUANTILES_PER_RANK, number=number).message)
    quantiles = [
        wire.decode(message, mine, QUANTILES_PER_RANK, sender, number=number).vector
        for message, sender in zip(messages, transport.ranks, strict=True)
    ]
    return (
        np.repeat(np.arange(transport.size), [vector.entries for vector in quantiles]),
        np.concatenate([vector.indices for vector in quantiles]).astype(np.int64),
        np.concatenate([vector.values for vector in quantiles]).astype(np.int64),
    )
