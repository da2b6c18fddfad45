"""Threshold: how many entries of each region are among the `wanted` largest of all regions.

Entries have one order: the larger |value| first; among equals the lower index, so the lower
region. Each owner sorts its own. In a round it sends the last value of each of 64 equal lots of
its undecided entries. All learn between which two of these the last wanted entry lies: what comes
before is in, what comes after is out. Drawn with two lots:

    region 0    in in | 9 7  6 4 | out       sends 7 4        5 are wanted and 3 are in: up to 8
    region 1    in    | 8    5 3 | out       sends 8 3        there is 1 more, up to 7 there are 3

    region 0    in in | 9 7 | out            sends 9 7        every lot is one entry: the 2 more
    region 1    in    | 8   | out            sends 8          are 9 and 8

A round leaves about a 32nd undecided: 25 thousand entries on each of 16 ranks take three, each an
allgather of 0.3 KB a rank (0.6 KB in float64). The result is exact: ties, too, have an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import MessageError
from ..transports.transport import Transport
from ..vector import Array, SparseVector
from ..wire import NOBODY
from .lots import at_positions, lot_ends
from .refusal import lowest

_LOTS: Final = 64
_NUMBERS: Final = 5  # before the values of a message


class Shares(NamedTuple):
    """What all ranks know in the end; by region, in their order.

    counts: how many of its largest entries are among the `wanted` largest.
    loads:  what the region's owner told besides.
    """

    counts: list[int]
    loads: list[int]
    refused_by: int


class _Told(NamedTuple):
    """One region's part in a round: of its entries in order, low..high-1 are undecided."""

    wanted: int
    low: int
    high: int
    load: int
    refused_by: int
    samples: Array  # -|value| at the end of each lot


def share_out(
    total: SparseVector,
    wanted: int,
    owners: Sequence[int],
    transport: Transport,
    load: int,
    refused_by: int,
) -> Shares:
    """Return how many entries of each region are among the `wanted` largest.

    total:  the entries of this rank's region, finite.
    owners: the rank of each region.
    load, refused_by: what the other ranks are to know besides.
    """
    here = owners.index(transport.rank)
    keys = -abs(total.values)  # ascending, the largest come first
    keys.sort()
    low, high = 0, min(wanted, total.entries)
    while True:
        lasts = [low + end - 1 for end in lot_ends(high - low, _LOTS)]
        mine = _Told(wanted, low, high, load, refused_by, at_positions(keys, lasts))
        told = _tell(mine, owners, transport)
        shares = Shares(
            [region.high for region in told],
            [region.load for region in told],
            lowest(*(region.refused_by for region in told)),
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

    def __init__(self, told: Sequence[_Told]) -> None:
        ends = [lot_ends(region.high - region.low, _LOTS) for region in told]
        sizes = [np.diff([0, *region]) for region in ends]
        # What a region's next lot hides: entries that may come before the lot's sample, its last.
        hidden_at_first = sum(int(lots[0]) - 1 for lots in sizes if lots.size)
        hidden_next = [np.append(lots[1:], 1) - 1 for lots in sizes]
        regions = np.repeat(np.arange(len(told)), [len(region) for region in ends])
        starts = np.repeat([region.low for region in told], [len(region) for region in ends])
        counts = starts + np.concatenate(ends).astype(np.int64)
        values = np.concatenate([region.samples for region in told])
        order = np.lexsort((counts, regions, values))
        self._lows = [region.low for region in told]
        self._regions, self._counts, self._values = regions[order], counts[order], values[order]
        size, hidden = np.concatenate(sizes)[order], np.concatenate(hidden_next)[order]
        self.is_exact = bool(size.max() == 1)
        # How many undecided entries come up to each sample: at least these, and at most those.
        self._least = np.cumsum(size)
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


def _tell(mine: _Told, owners: Sequence[int], transport: Transport) -> list[_Told]:
    """Return what every region's owner tells, by region."""
    *numbers, samples = mine
    message = np.concatenate([np.array(numbers, np.int64).view(np.uint8), samples.view(np.uint8)])
    messages = transport.allgather(message)
    return [
        _parse(messages[owner], mine, samples.dtype, transport.ranks[owner]) for owner in owners
    ]


def _parse(message: Array, mine: _Told, dtype: np.dtype[Any], sender: int) -> _Told:
    """Return what a message tells; raise MessageError where it is no message of this round."""
    head = 8 * _NUMBERS
    if message.size >= head and (message.size - head) % dtype.itemsize == 0:
        wanted, low, high, load, refused_by = message[:head].view(np.int64).tolist()
        told = _Told(wanted, low, high, load, refused_by, message[head:].view(dtype))
        if told.wanted != mine.wanted:
            raise MessageError(
                f"rank {sender} keeps k_out = {told.wanted} entries where this rank keeps "
                f"{mine.wanted}; every rank must pass the same k_out"
            )
        if (
            0 <= told.low <= told.high <= told.wanted
            and told.samples.size == len(lot_ends(told.high - told.low, _LOTS))
            and (told.samples[1:] >= told.samples[:-1]).all()
        ):
            return told
    raise MessageError(
        f"the message from rank {sender} is malformed: its {message.size} bytes are not samples "
        "of an oktopk reduction"
    )
