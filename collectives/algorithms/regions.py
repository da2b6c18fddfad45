"""Regions: divide the indices into one region per rank, its owner, which adds up the picks there.

    picks of      rank 0   .:.  .   . |   .   . |      ..     |  .      n = 40, P = 4
                  rank 1    ::    .   | .       |  .    .   . |    .
                  ...
    boundaries               0        12       19            33     40
    owners                   rank 1     rank 2     rank 3      rank 0

Boundaries divide all ranks' picks into equal parts, as estimated from quantiles: each rank divides
its picks into 4 P equal quantiles and sends the end of each. So a boundary is off by less than one
quantile of every rank, together a quarter of a region's fair share, and by far less if picks are
spread evenly within a quantile.
Of all rotations of owners, the one is chosen that leaves most picks on the rank that they are on.

The first step estimates the boundaries from its own picks, before it sends any. Picks hardly move
from step to step, so the boundaries serve many steps (Li and Hoefler 2022, section 3.1). All ranks
learn how full the regions were, and if one was too full they estimate anew in the next step.
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
# How many reductions use the same boundaries. Fewer keep regions more equal; each estimate costs an
# allgather.
EVERY: Final = 64
_TOO_FULL: Final = 1.5  # times the load of the fullest region when the boundaries were new


class Cut(NamedTuple):
    """The regions: bounds[r] <= index < bounds[r + 1] is region r, owned by rank owners[r]."""

    bounds: list[int]
    owners: list[int]


class Regions:
    """The boundaries in use, kept between steps; every rank keeps an equal copy."""

    def __init__(self) -> None:
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
        """Return the regions of this step, estimated from these picks if that is due."""
        cut = self._cut
        # All ranks keep equal copies, so they all call `estimate`, a collective, or none does.
        if (
            cut is None
            or self._served == EVERY
            or (cut.bounds[-1], len(cut.owners)) != (picks.length, transport.size)
        ):
            cut = self._cut = estimate(picks, transport)
            self._served = 0
        self._served += 1
        return cut

    def note_loads(self, loads: Sequence[int]) -> None:
        """Note how many entries each region got; if one got too many, estimate anew next time.

        The fullest is compared with the load when the boundaries were new, not with an equal share:
        a single index that all ranks pick cannot be divided.
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
    all_ranks = np.arange(size)

    def preference(rotation: int) -> tuple[int, int, int]:
        """Return the fewest picks that stay on any rank, then those on all ranks together."""
        # The rank on which the fewest stay sends the most, and all others wait for it.
        staying = picked[all_ranks, (all_ranks - rotation) % size]
        return int(staying.min()), int(staying.sum()), -rotation

    rotation = max(range(size), key=preference)
    return Cut(bounds, [(region + rotation) % size for region in range(size)])


def _ends(ranks: Array, points: Array, weights: Array, targets: Array) -> list[int]:
    """Return, for each target (ascending), the index before which all ranks have so many picks.

    Only the index of a quantile's last pick is known; the others are taken to be evenly spread. So
    a rank's count of picks up to an index is piecewise linear, with a step of 1 at the end of each
    quantile. This inverts the sum of the ranks' counts, which is piecewise linear between all their
    knots. It uses only single float64 operations, which every processor rounds alike: all ranks
    must get the same boundaries.
    """
    begins = np.where(np.diff(ranks, prepend=-1) > 0, -1, np.roll(points, 1))
    slopes = (weights - 1) / (points - begins)
    knots = np.concatenate([begins, points])
    # Stable: otherwise the order of equal knots depends on the processor.
    order = np.argsort(knots, kind="stable")
    knots, slope = knots[order], np.cumsum(np.concatenate([slopes, -slopes])[order])
    steps = (order >= begins.size).astype(np.float64)
    counts = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(knots))]) + np.cumsum(steps)
    after = np.minimum(np.searchsorted(counts, targets), counts.size - 1)
    # From the first knot with at least `target` picks, go back along the slope before it, which is
    # positive if the count exceeds the target by more than the knot's step.
    excess = np.maximum(0.0, counts[after] - steps[after] - targets)
    back = np.divide(excess, slope[after - 1], out=np.zeros_like(excess), where=excess > 0)
    back = np.clip(np.ceil(back), 0, knots[after] - knots[after - 1]).astype(np.int64)
    return [int(index) + 1 for index in knots[after] - back]


def _gather_quantiles(picks: SparseVector, transport: Transport) -> tuple[Array, Array, Array]:
    """Return rank, last index and size of every rank's quantiles, int64 [m] each.

    They are sent as a sparse vector: its value at a quantile's last index is the quantile's size.
    """
    ends = quantile_ends(picks.entries, QUANTILES_PER_RANK * transport.size)
    lasts = at_positions(picks.indices, [end - 1 for end in ends])
    sizes = np.diff([0, *ends]).astype(picks.values.dtype)
    own = SparseVector(lasts, sizes, picks.length)
    k = QUANTILES_PER_RANK  # any number that is the same on all ranks
    message = wire.encode(own, k, number=transport.begun).message
    quantiles = [each.vector for each in wire.allgather(message, own, k, transport)]
    return (
        np.repeat(np.arange(transport.size), [vector.entries for vector in quantiles]),
        np.concatenate([vector.indices for vector in quantiles]).astype(np.int64),
        np.concatenate([vector.values for vector in quantiles]).astype(np.int64),
    )
