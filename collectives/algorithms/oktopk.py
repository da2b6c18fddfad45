"""oktopk: the exact top-k of the sum of all picks, at a cost that hardly grows with P.

Li and Hoefler 2022 ("Near-optimal sparse allreduce", PPoPP), section 3:

    split       every rank sends each region's picks to the region's owner        P - 1 messages
    reduce      the owner adds them up, in rank order: its region's sums are exact
    threshold   all learn how many of each region's sums are in the update        2 or 3 allgathers
    balance     owners with more than their share send the surplus on             few messages
    gather      everyone gets everyone's share                                    an allgather

A rank sends, in 4-byte words (two for an entry): at most 2 k to split, and 2 k (P-1)/P if its picks
are spread evenly; 2 k_out (P-1)/P each to balance and to gather. So 6 k (P-1)/P for k_out = k,
besides headers (64 bytes a message), the threshold's samples (at most 0.6 KB per rank and round)
and, in a step that computes new boundaries, 4 P entries of each rank (`regions`).

The sum of an index contains all picks of it. They are all in the update, or all return to their
owners, so the paper's rule loses nothing here.

Balance: the update's entries, in index order, are cut into equal blocks before the allgather.

    entries   region 0: 0 1 2 3 4 5   region 1: -   region 2: 6 7        6 + 0 + 2 entries, 3 blocks
    blocks    0: 0 1 | 1: 2 3 4 | 2: 5 6 7          region 0's owner sends 2 3 4 and 5

Block b goes to the owner of region b, so little moves if the regions are about equal. If no region
holds much more than its share, nothing is moved at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from .. import wire
from ..errors import MessageError
from ..kernels import contains, merge, sum_by_index
from ..transports.transport import Transport
from ..vector import Array, SparseVector
from ..wire import EXACT, NOBODY, Format
from .conservation import (
    ReductionResult,
    check_finite,
    intersect,
    lowest_refusing,
    refused_result,
    rounding_error,
    split_result,
    sum_vectors,
)
from .regions import Cut, Regions
from .threshold import region_quotas

# Balance only if the largest part exceeds the mean by this factor: the allgather takes that much
# longer, while balancing costs a message and the surplus.
_MAX_IMBALANCE: Final = 1.25


def is_even(counts: Sequence[int]) -> bool:
    """Tell whether parts of these sizes need no balancing."""
    # The second bound is for few entries: parts of one entry or none cannot be more even.
    return max(counts) * len(counts) <= max(_MAX_IMBALANCE * sum(counts), len(counts))


def block_slices(counts: Sequence[int]) -> list[list[slice]]:
    """Return, for each region and block, the slice of the region's entries that go to the block."""
    total, parts = sum(counts), len(counts)
    bounds = [total * block // parts for block in range(parts + 1)]
    plan = []
    start = 0
    for count in counts:
        inside = [min(max(bound - start, 0), count) for bound in bounds]
        plan.append([slice(a, b) for a, b in itertools.pairwise(inside)])
        start += count
    return plan


def reduce(
    selected: SparseVector,
    k: int,
    transport: Transport,
    *,
    format: Format = EXACT,
    k_out: int | None = None,
    regions: Regions | None = None,
) -> tuple[SparseVector, SparseVector]:
    """Agree on the k_out largest of the sum of all picks; ties go to the lower index.

    k_out:   how many entries the update may have; k by default.
    regions: keeps the regions' boundaries between steps, which saves an allgather; None: computed
             anew in each step. Every rank passes one that has served the same steps, or None.
    """
    k_out = checked_k_out(k, k_out, selected.length)
    return split_result(reduce_list(selected, k, k_out, transport, format, regions or Regions()))


def checked_k_out(k: int, k_out: int | None, length: int) -> int:
    """Return k_out, or k for None; raise ValueError where it is not in 1..length."""
    if k_out is None:
        return k
    if not 1 <= k_out <= length:
        raise ValueError(f"k_out must lie in 1..{length} (the vector's length), got {k_out}")
    return k_out


def reduce_list(
    selected: SparseVector,
    k: int,
    k_out: int,
    transport: Transport,
    format: Format,
    regions: Regions,
    refused_by: int = NOBODY,
) -> ReductionResult:
    """Return this rank's result; refused_by: a rank that has refused already, or NOBODY."""
    picks, refused_by = check_finite(selected, transport.ranks[transport.rank], refused_by)
    cut = regions.agree(picks, transport)
    step = _Step(transport, cut, format)

    lists, refused_by = step.split(picks, k, refused_by)
    if refused_by != NOBODY:  # on every rank, as each has a message of all others
        return refused_result(selected, refused_by)
    total, refused_by = check_finite(sum_by_index(lists), transport.ranks[transport.rank])

    # Count entries before they are added up: receiving them is the cost of a region too full.
    load = sum(vector.entries for vector in lists)
    quotas = region_quotas(total, k_out, cut.owners, transport, load, refused_by)
    # Even if a rank refused: all ranks have the same loads, and so keep equal boundaries.
    regions.note_loads(quotas.loads)
    if quotas.refused_by != NOBODY:
        return refused_result(selected, quotas.refused_by)
    block = _largest(total, quotas.counts[step.region])
    if not is_even(quotas.counts):
        block = step.balance(block, k_out, quotas.counts)
    update = step.gather(block, k_out)

    # A pick whose index is not in the update returns whole, without its rounding error.
    dropped = selected.where(~contains(update.indices, selected.indices))
    return ReductionResult(update, dropped, intersect(sum_vectors(step.errors), update))


def _largest(vector: SparseVector, count: int) -> SparseVector:
    # `merge` refuses k = 0, but a region may have no entry in the update.
    empty = vector.take(slice(0))
    return merge(vector, empty, count) if count else empty


class _Step:
    """The exchanges of one reduction.

    region: the one this rank owns. errors: this rank's rounding errors.
    """

    def __init__(self, transport: Transport, cut: Cut, format: Format) -> None:
        self.transport = transport
        self.cut = cut
        self.format = format
        self.region = cut.owners.index(transport.rank)
        self.errors: list[SparseVector] = []

    def split(self, picks: SparseVector, k: int, refused_by: int) -> tuple[list[SparseVector], int]:
        """Return the ranks' picks in this rank's region, by rank, and the lowest refusing rank."""
        rank, size = self.transport.rank, self.transport.size
        bounds, owners = self.cut
        first, end = bounds[self.region : self.region + 2]
        lists = {rank: picks.index_range(first, end)}
        # In rotated order, so that ranks do not all send to the same owner first.
        others = [(rank + distance) % size for distance in range(1, size)]
        regions = map(owners.index, others)
        parts = (picks.index_range(*bounds[region : region + 2]) for region in regions)
        sources = others[::-1]
        received = self._exchange(zip(parts, others, strict=True), sources, picks, k, refused_by)
        for source, (source_picks, _, source_refused_by) in zip(sources, received, strict=True):
            if source_picks.index_range(first, end).entries != source_picks.entries:
                raise MessageError(
                    f"the message from rank {self.transport.ranks[source]} has entries outside of "
                    f"{first}..{end - 1}, this rank's region; every rank must pass regions that "
                    "served the same steps"
                )
            lists[source] = source_picks
            refused_by = lowest_refusing(refused_by, source_refused_by)
        return [lists[rank] for rank in range(size)], refused_by

    def balance(self, entries: SparseVector, k_out: int, counts: list[int]) -> SparseVector:
        """Send the entries of other blocks to their owners, and return this rank's block."""
        owners, plan, own_region = self.cut.owners, block_slices(counts), self.region
        # All ranks know all counts, and so which parts are empty: those are not sent.
        outgoing = [
            (entries.take(part), owners[block])
            for block, part in enumerate(plan[own_region])
            if block != own_region and part.start < part.stop
        ]
        incoming = [
            region
            for region, row in enumerate(plan)
            if region != own_region and row[own_region].start < row[own_region].stop
        ]
        received = self._exchange(outgoing, [owners[each] for each in incoming], entries, k_out)
        return sum_vectors(
            [entries.take(plan[own_region][own_region]), *(decoded.vector for decoded in received)]
        )

    def gather(self, block: SparseVector, k_out: int) -> SparseVector:
        """Return the blocks of all ranks as one vector."""
        encoded = wire.encode(block, k_out, self.format, number=self.transport.begun)
        self.errors.append(rounding_error(block, encoded.vector, self.format))
        blocks = wire.allgather(encoded.message, block, k_out, self.transport, self.format)
        # Blocks are disjoint, but by rank they are not in index order, as owners are rotated.
        return sum_by_index([decoded.vector for decoded in blocks])

    def _exchange(
        self,
        parts: Iterable[tuple[SparseVector, int]],
        sources: Sequence[int],
        like: SparseVector,
        k: int,
        refused_by: int = NOBODY,
    ) -> list[wire.Decoded]:
        """Send parts, each to its rank, and return the part that each of the sources sent."""
        number = self.transport.begun

        def messages() -> Iterator[tuple[Array, int]]:
            for part, to in parts:
                encoded = wire.encode(part, k, self.format, refused_by=refused_by, number=number)
                self.errors.append(rounding_error(part, encoded.vector, self.format))
                yield encoded.message, to

        received = self.transport.exchange_all(messages(), sources)
        return [
            wire.decode(message, like, k, self.transport.ranks[source], self.format, number=number)
            for source, message in zip(sources, received, strict=True)
        ]
