"""oktopk: the exact top-k of the sum of all picks, at a cost that hardly grows with P.

Li and Hoefler 2022 ("Near-optimal sparse allreduce", PPoPP), section 3:

    split       every rank sends each region's picks to the region's owner        P - 1 messages
    reduce      the owner adds them up, in rank order: its region's sums are exact
    threshold   all learn how many of each region's sums are in the update        2 or 3 allgathers
    balance     owners with more than their share send the surplus on             few messages
    gather      everyone gets everyone's share                                    an allgather

Words of 4 bytes that a rank sends, an entry being two: at most 2 k for the split, 2 k (P-1)/P where
a rank's picks spread evenly; 2 k_out (P-1)/P each to balance and to gather. So 6 k (P-1)/P for
k_out = k, besides headers (64 bytes a message), the threshold's samples (0.6 KB a rank and round
at most) and, in a step that draws new boundaries, 4 P entries of each rank (`regions`).

A pick is in the update, with all others of its index, or returns to its owner: the paper's rule
loses nothing here.

Balance: the update's entries, in index order, dealt out in equal blocks before the allgather.

    entries   region 0: 0 1 2 3 4 5   region 1: -   region 2: 6 7        6 + 0 + 2 entries, 3 blocks
    blocks    0: 0 1 | 1: 2 3 4 | 2: 5 6 7          region 0's owner sends 2 3 4 and 5

Block b goes to the owner of region b, so that where the regions are even little moves; and where
no region holds much more than its share nothing moves at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from .. import wire
from ..errors import MessageError
from ..kernels import contains, merge, sum_by_index
from ..transports.transport import Transport
from ..vector import SparseVector
from ..wire import EXACT, NOBODY, Format
from .conservation import (
    ReductionResult,
    check_finite,
    intersect,
    lowest_refusing,
    refused,
    rounding_error,
    split_result,
    sum_vectors,
)
from .regions import Cut, Regions
from .threshold import region_quotas

# Parts are even enough if the largest is at most so many times the mean: the allgather takes that
# much longer, while a move costs a message and the surplus.
_EVEN: Final = 1.25


def is_even(counts: Sequence[int]) -> bool:
    """Tell whether these parts can be gathered as they are."""
    # Parts of one entry or none cannot be more even: hence the second bound, for few entries.
    return max(counts) * len(counts) <= max(_EVEN * sum(counts), len(counts))


def moves(counts: Sequence[int]) -> list[list[slice]]:
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
    regions: keeps the boundaries between steps; without one each step draws its own. Every rank
             passes one that is as old, or none.
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
    """Return the outcome; refused_by: a rank that refused before; the list then counts as empty."""
    picks, refused_by = check_finite(selected, transport.ranks[transport.rank], refused_by)
    cut = regions.agree(picks, transport)
    step = _Step(transport, cut, format)

    lists, refused_by = step.split(picks, k, refused_by)
    if refused_by != NOBODY:  # on every rank, as each has a message of all others
        return refused(selected, refused_by)
    total, refused_by = check_finite(sum_by_index(lists), transport.ranks[transport.rank])

    # Entries before they are added up: receiving them is what a region that is too full costs.
    load = sum(vector.entries for vector in lists)
    shares = region_quotas(total, k_out, cut.owners, transport, load, refused_by)
    # Also of a step that is refused: the loads are the same on all ranks, so copies stay equal.
    regions.note_loads(shares.loads)
    if shares.refused_by != NOBODY:
        return refused(selected, shares.refused_by)
    block = _largest(total, shares.counts[step.region])
    if not is_even(shares.counts):
        block = step.balance(block, k_out, shares.counts)
    update = step.gather(block, k_out)

    # A pick whose index is not in the update returns whole, so the rounding errors of its index
    # must not return beside it.
    dead = selected.where(~contains(update.indices, selected.indices))
    return ReductionResult(update, dead, intersect(sum_vectors(step.errors), update))


def _largest(vector: SparseVector, count: int) -> SparseVector:
    # `merge` takes no k of 0, which is what a region may have in the update.
    nothing = vector.take(slice(0))
    return merge(vector, nothing, count) if count else nothing


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
        first, end = self.cut.bounds[self.region : self.region + 2]
        lists = {rank: picks.index_range(first, end)}
        sends = []
        for distance in range(1, size):
            # Rotated: ranks do not all send to the same owner first.
            to = (rank + distance) % size
            region = self.cut.owners.index(to)
            part = picks.index_range(*self.cut.bounds[region : region + 2])
            sends.append(self._send(part, to, k, refused_by))
        for distance in range(1, size):
            source = (rank - distance) % size
            decoded = self._receive(source, picks, k)
            theirs = decoded.vector
            if theirs.index_range(first, end).entries != theirs.entries:
                raise MessageError(
                    f"the message from rank {self.transport.ranks[source]} has entries outside of "
                    f"{first}..{end - 1}, this rank's region; every rank must pass regions of one "
                    "age"
                )
            lists[source] = theirs
            refused_by = lowest_refusing(refused_by, decoded.refused_by)
        for sent in sends:
            sent()
        return [lists[rank] for rank in range(size)], refused_by

    def balance(self, entries: SparseVector, k_out: int, counts: list[int]) -> SparseVector:
        """Send the entries of other blocks to their owners, and return this rank's block."""
        # All ranks know all counts, and so who gets what from whom: no empty part is sent.
        owners, plan = self.cut.owners, moves(counts)
        sends = [
            self._send(entries.take(part), owners[block], k_out)
            for block, part in enumerate(plan[self.region])
            if block != self.region and part.start < part.stop
        ]
        parts = []
        for region, row in enumerate(plan):
            part = row[self.region]
            if region == self.region:
                parts.append(entries.take(part))
            elif part.start < part.stop:
                parts.append(self._receive(owners[region], entries, k_out).vector)
        for sent in sends:
            sent()
        return sum_vectors(parts)

    def gather(self, block: SparseVector, k_out: int) -> SparseVector:
        """Return the blocks of all ranks as one vector."""
        number = self.transport.begun
        encoded = wire.encode(block, k_out, self.format, number=number)
        self.errors.append(rounding_error(block, encoded.vector, self.format))
        # This rank decodes its own block, too: the update has rounded values on all ranks.
        messages = self.transport.allgather(encoded.message)
        blocks = [
            wire.decode(message, block, k_out, sender, self.format, number=number).vector
            for message, sender in zip(messages, self.transport.ranks, strict=True)
        ]
        # The blocks are disjoint, but not in the order of their indices: regions are dealt to the
        # ranks by a rotation.
        return sum_by_index(blocks)

    def _send(
        self, part: SparseVector, to: int, k: int, refused_by: int = NOBODY
    ) -> Callable[[], None]:
        encoded = wire.encode(
            part, k, self.format, refused_by=refused_by, number=self.transport.begun
        )
        self.errors.append(rounding_error(part, encoded.vector, self.format))
        return self.transport.send(encoded.message, to)

    def _receive(self, source: int, like: SparseVector, k: int) -> wire.Decoded:
        message, sender = self.transport.receive(source), self.transport.ranks[source]
        return wire.decode(message, like, k, sender, self.format, number=self.transport.begun)
