"""Threshold: count how many entries of each region are among the `k_out` largest of all regions.

Entries are ordered by |value|, the largest first; among equals the lower index (and so the lower
region) comes first. Each owner sorts its own. In a round it sends the last value of each of 64
equal quantiles of its undecided entries. From these all ranks find two samples with the last wanted
entry between them: entries before them are in, entries after them are out. With two quantiles:

    region 0    in in | 9 7  6 4 | out       sends 7 4        5 are wanted and 3 are in: 2 more.
    region 1    in    | 8    5 3 | out       sends 8 3        3 lie up to 7: those after it are out

    region 0    in in | 9 7 | out            sends 9 7        each quantile is one entry: the 2 more
    region 1    in    | 8   | out            sends 8          are 9 and 8

A round leaves about 1/32 undecided: 25 thousand entries on each of 16 ranks take three rounds, each
an allgather of 0.4 KB a rank (0.6 KB in float64). The result is exact, ties included.
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
NUMBERS_BYTES: Final = 3 * 8  # of a message's low, high and load, before the samples


class RegionQuotas(NamedTuple):
    """The result, the same on all ranks.

    counts: by region, how many of its largest entries are among the `k_out` largest.
    loads:  by region, the `load` that its owner passed.
    """

    counts: list[int]
    loads: list[int]
    refused_by: int


class _RegionCounts(NamedTuple):
    """A region's state in a round: of its entries in order, low..high-1 are undecided."""

    low: int
    high: int
    load: int
    refused_by: int
    samples: Array  # -|value| at the end of each quantile


def region_quotas(
    total: SparseVector,
    k_out: int,
    owners: Sequence[int],
    transport: Transport,
    load: int,
    refused_by: int,
) -> RegionQuotas:
    """Return how many entries of each region are among the `k_out` largest.

    total:  the entries of this rank's region, finite.
    owners: the rank of each region.
    load, refused_by: this rank's; they are exchanged along with the samples.
    """
    own_region = owners.index(transport.rank)
    keys = -abs(total.values)  # negated, so that ascending order puts the largest first
    keys.sort()
    # At most `k_out` entries of a region can be in the result: the rest are out at once.
    low, high = 0, min(k_out, total.entries)
    # All ranks see the same numbers in each round, so they all leave the loop in the same one.
    while True:
        lasts = [low + end - 1 for end in quantile_ends(high - low, QUANTILES)]
        own = _RegionCounts(low, high, load, refused_by, at_positions(keys, lasts))
        regions = _gather_counts(own, total, k_out, owners, transport)
        quotas = RegionQuotas(
            [region.high for region in regions],
            [region.load for region in regions],
            lowest_refusing(*(region.refused_by for region in regions)),
        )
        if quotas.refused_by != NOBODY or sum(quotas.counts) <= k_out:
            return quotas
        search = _Search(regions)
        before, last = search.bracket(k_out - sum(region.low for region in regions))
        if search.is_exact:
            return quotas._replace(counts=search.counts(last))
        if before is not None:
            low = search.count(before, keys, own_region)
        high = search.count(last, keys, own_region)


class _Search:
    """The samples of all regions in one round, in the order of entries.

    is_exact: whether every undecided entry is a sample.
    """

    def __init__(self, states: Sequence[_RegionCounts]) -> None:
        ends = [quantile_ends(region.high - region.low, QUANTILES) for region in states]
        sizes = [np.diff([0, *region]) for region in ends]
        # A sample is its quantile's last entry. The quantile's others are hidden: before a sample
        # of another region there may be as many as the region's next quantile hides.
        hidden_at_first = sum(int(quantiles[0]) - 1 for quantiles in sizes if quantiles.size)
        hidden_next = [np.append(quantiles[1:], 1)[: quantiles.size] - 1 for quantiles in sizes]
        regions = np.repeat(np.arange(len(states)), [len(region) for region in ends])
        starts = np.repeat([region.low for region in states], [len(region) for region in ends])
        counts = starts + np.concatenate(ends).astype(np.int64)
        values = np.concatenate([region.samples for region in states])
        # By |value|, then region, then place in it: a total order.
        order = np.lexsort((counts, regions, values))
        self._lows = [region.low for region in states]
        self._regions, self._counts, self._values = regions[order], counts[order], values[order]
        size, hidden = np.concatenate(sizes)[order], np.concatenate(hidden_next)[order]
        self.is_exact = bool(size.max() == 1)
        # At least so many undecided entries are before each sample, itself included: the quantiles
        # that end there. At most so many: also what each region's next quantile hides, but for the
        # sample's own region, where that comes after it.
        self._least = np.cumsum(size)
        self._most = self._least + hidden_at_first + np.cumsum(hidden - size + 1) - hidden

    def bracket(self, needed: int) -> tuple[int | None, int]:
        """Return the samples between which the `needed`-th entry lies.

        The last sample with certainly fewer than `needed` entries up to it (or None), and the first
        with certainly as many.
        """
        fewer = np.flatnonzero(self._most < needed)
        return int(fewer[-1]) if fewer.size else None, int(self._least.searchsorted(needed))

    def counts(self, sample: int) -> list[int]:
        """Return how many entries of each region come up to a sample, if all are samples."""
        counted = np.bincount(self._regions[: sample + 1], minlength=len(self._lows))
        return [low + int(count) for low, count in zip(self._lows, counted, strict=True)]

    def count(self, sample: int, keys: Array, region: int) -> int:
        """Return how many of a region's sorted entries come up to a sample."""
        if self._regions[sample] == region:
            return int(self._counts[sample])
        ties_come_before = region < self._regions[sample]
        value = self._values[sample]
        return int(keys.searchsorted(value, "right" if ties_come_before else "left"))


def _gather_counts(
    own: _RegionCounts,
    like: SparseVector,
    k_out: int,
    owners: Sequence[int],
    transport: Transport,
) -> list[_RegionCounts]:
    """Gather the states of all regions, by region, in the extra bytes of empty messages.

    Those are low, high and load, int64 [3], then the samples, padded to the most there may be.
    """
    empty = like.take(slice(0))
    # The same size on all ranks, as `decode` must know it in advance.
    extra = np.zeros(NUMBERS_BYTES + min(QUANTILES, k_out) * own.samples.itemsize, np.uint8)
    extra[:NUMBERS_BYTES].view(np.int64)[:] = own.low, own.high, own.load
    extra[NUMBERS_BYTES:].view(own.samples.dtype)[: own.samples.size] = own.samples
    message = wire.encode(
        empty, k_out, extra=extra, refused_by=own.refused_by, number=transport.begun
    ).message
    ranks = wire.allgather(message, empty, k_out, transport, extra_bytes=extra.size)
    regions = []
    for owner in owners:
        _, extra, refused_by = ranks[owner]
        low, high, load = extra[:NUMBERS_BYTES].view(np.int64).tolist()
        if not 0 <= low <= high <= k_out:
            raise MessageError(
                f"the message from rank {transport.ranks[owner]} is malformed: its "
                f"undecided entries, from {low} to {high}, must lie in 0..{k_out}"
            )
        samples = extra[NUMBERS_BYTES:].view(own.samples.dtype)[: min(QUANTILES, high - low)]
        regions.append(_RegionCounts(low, high, load, refused_by, samples))
    return regions
