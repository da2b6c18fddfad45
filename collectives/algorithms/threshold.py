"""Threshold: counts each region's entries among the `wanted` largest of all regions.

Entries have one order: the larger |value| first; among equals the lower index, so the lower
region. Each owner sorts its own. In a round it sends the last value of each of 64 equal quantiles
of its undecided entries. All learn between which two of these the last wanted entry lies: what
comes before is in, what comes after is out. Drawn with two quantiles:

    region 0    in in | 9 7  6 4 | out       sends 7 4        5 are wanted and 3 are in: up to 8
    region 1    in    | 8    5 3 | out       sends 8 3        there is 1 more, up to 7 there are 3

    region 0    in in | 9 7 | out            sends 9 7        each quantile is one entry: the 2 more
    region 1    in    | 8   | out            sends 8          are 9 and 8

A round leaves about a 32nd undecided: 25 thousand entries on each of 16 ranks take three, each an
allgather of 0.4 KB a rank (0.6 KB in float64). The result is exact: ties, too, have an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from .. import wire
from ..errors import MessageError
from ..transports.transport import Transport
from ..vector import Array, SparseVector
from ..wire import NOBODY
from .conservation import lowest_refusing
from .regions import at_positions, quantile_ends

QUANTILES: Final = 64
NUMBERS_BYTES: Final = 3 * 8  # in a message, before the samples


class RegionQuotas(NamedTuple):
    """The result, the same on all ranks; by region, in their order.

    counts: how many of its largest entries are among the `wanted` largest.
    loads:  the `load` that the region's owner passed.
    """

    counts: list[int]
    loads: list[int]
    refused_by: int


class _RegionCounts(NamedTuple):
    """One region's part in a round: of its entries in order, low..high-1 are undecided."""

    low: int
    high: int
    load: int
    refused_by: int
    samples: Array  # -|value| at the end of each quantile


def region_quotas(
    total: SparseVector,
    wanted: int,
    owners: Sequence[int],
    transport: Transport,
    load: int,
    refused_by: int,
) -> RegionQuotas:
    """Return how many entries of each region are among the `wanted` largest.

    total:  the entries of this rank's region, finite.
    owners: the rank of each region.
    load, refused_by: further numbers that all ranks exchange.
    """
    here = owners.index(transport.rank)
    keys = -abs(total.values)  # ascending, the largest come first
    keys.sort()
    # A region has at most `wanted` entries in the result: those behind are out from the beginning.
    low, high = 0, min(wanted, total.entries)
    # All ranks have the same numbers of each round, so they leave the loop in the same one.
    while True:
        lasts = [low + end - 1 for end in quantile_ends(high - low, QUANTILES)]
        mine = _RegionCounts(low, high, load, refused_by, at_positions(keys, lasts))
        told = _gather_counts(mine, total, wanted, owners, transport)
        shares = RegionQuotas(
            [region.high for region in told],
            [region.load for region in told],
            lowest_refusing(*(region.refused_by for region in told)),
        )
        if shares.refused_by != NOBODY or sum(shares.counts) <= wanted:
            return shares
        search = _Search(told)
        before, last = search.bracket(wanted - sum(region.low for region in told))
        if search.is_exact:
            return shares._replace(counts=search.counts(last))
        if before is not None:
            low = search.count(before, keys, here)
        high = search.count(last, keys, here)


class _Search:
    """The samples of a round, in the order of entries.

    is_exact: whether every undecided entry is a sample.
    """

    def __init__(self, told: Sequence[_RegionCounts]) -> None:
        ends = [quantile_ends(region.high - region.low, QUANTILES) for region in told]
        sizes = [np.diff([0, *region]) for region in ends]
        # Entries of a region's next quantile that may come before its sample, which is its last.
        hidden_at_first = sum(int(quantiles[0]) - 1 for quantiles in sizes if quantiles.size)
        hidden_next = [np.append(quantiles[1:], 1)[: quantiles.size] - 1 for quantiles in sizes]
        regions = np.repeat(np.arange(len(told)), [len(region) for region in ends])
        starts = np.repeat([region.low for region in told], [len(region) for region in ends])
        counts = starts + np.concatenate(ends).astype(np.int64)
        values = np.concatenate([region.samples for region in told])
        # By |value|, then region, then place in it: an order in which no two entries are equal.
        order = np.lexsort((counts, regions, values))
        self._lows = [region.low for region in told]
        self._regions, self._counts, self._values = regions[order], counts[order], values[order]
        size, hidden = np.concatenate(sizes)[order], np.concatenate(hidden_next)[order]
        self.is_exact = bool(size.max() == 1)
        # How many undecided entries come up to each sample: at least these, and at most those.
        self._least = np.cumsum(size)
        # Less the hidden ones of a sample's own next quantile: they come behind it.
        self._most = self._least + hidden_at_first + np.cumsum(hidden - size + 1) - hidden

    def bracket(self, needed: int) -> tuple[int | None, int]:
        """Return the last sample with certainly fewer than `needed` entries up to it (or None),
        and the first with certainly as many."""
        fewer = np.flatnonzero(self._most < needed)
        return int(fewer[-1]) if fewer.size else None, int(self._least.searchsorted(needed))

    def counts(self, sample: int) -> list[int]:
        """Return how many entries of each region come up to a sample, where all are samples."""
        seen = np.bincount(self._regions[: sample + 1], minlength=len(self._lows))
        return [low + int(count) for low, count in zip(self._lows, seen, strict=True)]

    def count(self, sample: int, keys: Array, region: int) -> int:
        """Return how many of a region's sorted entries come up to a sample."""
        if self._regions[sample] == region:
            return int(self._counts[sample])
        ties_come_before = region < self._regions[sample]
        value = self._values[sample]
        return int(keys.searchsorted(value, "right" if ties_come_before else "left"))


def _gather_counts(
    mine: _RegionCounts,
    like: SparseVector,
    wanted: int,
    owners: Sequence[int],
    transport: Transport,
) -> list[_RegionCounts]:
    """Gather every region owner's numbers, by region, in the extra bytes of empty messages.

    low, high and load, int64 [3], and the samples, filled up to as many as there may be.
    """
    nothing = like.take(slice(0))
    # The same size on all ranks: `decode` must know it before it can read the number of samples.
    extra = np.zeros(NUMBERS_BYTES + min(QUANTILES, wanted) * mine.samples.itemsize, np.uint8)
    extra[:NUMBERS_BYTES].view(np.int64)[:] = mine.low, mine.high, mine.load
    extra[NUMBERS_BYTES:].view(mine.samples.dtype)[: mine.samples.size] = mine.samples
    number = transport.begun
    encoded = wire.encode(nothing, wanted, extra=extra, refused_by=mine.refused_by, number=number)
    messages = transport.allgather(encoded.message)
    told = []
    for owner in owners:
        sender = transport.ranks[owner]
        _, extra, refused_by = wire.decode(
            messages[owner], nothing, wanted, sender, extra_bytes=extra.size, number=number
        )
        low, high, load = extra[:NUMBERS_BYTES].view(np.int64).tolist()
        if not 0 <= low <= high <= wanted:
            raise MessageError(
                f"the message from rank {sender} is malformed: of its {wanted} largest entries "
                f"number {low} to {high} should be undecided"
            )
        samples = extra[NUMBERS_BYTES:].view(mine.samples.dtype)[: min(QUANTILES, high - low)]
        told.append(_RegionCounts(low, high, load, refused_by, samples))
    return told
