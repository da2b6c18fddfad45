"""hierarchical: sum inside each node, where bytes are cheap; reduce sparsely across the nodes.

    nodes      0 1 2    3 4          the smallest has 2 ranks, so vectors have 2 shards; the owners
    shard 0    0        3            of a shard, one in each node, reduce it among themselves
    shard 1      1        4          rank 2 owns nothing

    inside     0 -> 1, 1 -> 0, 2 -> 0 1; 3 -> 4, 4 -> 3       each shard's picks to its owner
    across     0 <-> 3 and 1 <-> 4, at the same time          gtopk or oktopk
    inside     back the same way                              the update, and which picks are alive

A node sends as much as a single rank would: all its shards together have k entries. With one rank
in each node this is the reduction across, bit for bit. Shi et al. 2021 (HiTopKComm) reduce dense
gradients in this way; `Hierarchy` does that for an optimizer: each node keeps one residual, in
shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import wire
from ..errors import MessageError
from ..kernels import contains, merge, sum_by_index
from ..transports.transport import Transport
from ..vector import Array, SparseVector
from ..wire import EXACT, NOBODY, Format
from . import gtopk, oktopk
from .conservation import (
    ReductionResult,
    alive_bytes,
    check_finite,
    lowest_refusing,
    pack_alive,
    refused_result,
    split_result,
    sum_vectors,
    unpack_alive,
)
from .options import check_names
from .regions import Regions


def find_nodes(transport: Transport, node_size: int | None = None) -> list[list[int]]:
    """Return the ranks of every host, found by a small allgather.

    node_size: if given, so many consecutive ranks form a node, and nothing is exchanged.
    """
    if node_size is not None:
        all_ranks = list(range(transport.size))
        return [all_ranks[first : first + node_size] for first in all_ranks[::node_size]]
    # A host is identified by its lowest rank, which all its ranks know.
    lowest = np.array([min(transport.node())], np.int64)
    nodes: dict[int, list[int]] = {}
    for rank, message in enumerate(transport.allgather(lowest.view(np.uint8))):
        if message.size != lowest.nbytes:
            raise MessageError(
                f"the message from rank {transport.ranks[rank]} is malformed: it has "
                f"{message.size} bytes, but a rank number has {lowest.nbytes}; every rank must run "
                "the same algorithm"
            )
        nodes.setdefault(int(message.view(np.int64)[0]), []).append(rank)
    return checked_nodes(nodes.values(), transport.size)


def checked_nodes(nodes: Iterable[Sequence[int]], size: int) -> list[list[int]]:
    """Return the nodes by their lowest rank; raise ValueError unless each rank has exactly one."""
    ordered = sorted(sorted(node) for node in nodes if len(node))
    if sorted(rank for node in ordered for rank in node) != list(range(size)):
        raise ValueError(
            f"nodes must have each of the ranks 0..{size - 1} in exactly one list, got {ordered}"
        )
    return ordered


ReduceList = Callable[[SparseVector, int, int, Transport, int], ReductionResult]


class InterNodeReduction(NamedTuple):
    """The sparse reduction across nodes, with its options bound.

    reduce: takes a shard's picks, k and k_out, the transport, and refused_by.
    k_out:  how many entries the whole update may have; k for an algorithm without this option.
    """

    reduce: ReduceList
    k_out: int


def open_inter_node(
    name: str, format: Format, options: dict[str, Any], k: int, length: int
) -> InterNodeReduction:
    """Return "gtopk" or "oktopk" with its options; raise ValueError if one is out of bounds."""
    if name == "gtopk":
        check_names(name, gtopk.reduce, options)
        growth = options.get("growth", 1.0)
        gtopk.check_growth(growth)
        return InterNodeReduction(
            lambda picks, k, k_out, transport, refused_by: gtopk.reduce_list(
                picks, k, transport, format, growth, refused_by
            ),
            k,
        )
    if name == "oktopk":
        check_names(name, oktopk.reduce, options)
        regions = options.get("regions") or Regions()
        return InterNodeReduction(
            lambda picks, k, k_out, transport, refused_by: oktopk.reduce_list(
                picks, k, k_out, transport, format, regions, refused_by
            ),
            oktopk.checked_k_out(k, options.get("k_out"), length),
        )
    raise ValueError(f"across must be one of gtopk, oktopk; got {name!r}")


def reduce(
    selected: SparseVector,
    k: int,
    transport: Transport,
    *,
    format: Format = EXACT,
    nodes: Iterable[Sequence[int]] | None = None,
    across: str = "gtopk",
    **options: Any,
) -> tuple[SparseVector, SparseVector]:
    """Sum the picks inside each node and agree, shard by shard, on the k largest across nodes.

    nodes:  the ranks of each node, equal on all ranks; by default one node per host, found by an
            allgather (`find_nodes`).
    across: "gtopk" or "oktopk"; `options` are that algorithm's.
    format: of the messages across; inside a node values stay exact.
    """
    # First, to find a wrong option before `Hierarchy` sends anything.
    inter_node = open_inter_node(across, format, options, k, selected.length)
    return split_result(_Step(selected, k, inter_node, Hierarchy(transport, nodes)).outcome())


class Hierarchy:
    """This rank's node and shard, to reduce dense gradients hierarchically.

    Each rank that owns a shard keeps a residual for it:

        gradient -> scatter -> residual += shard, select -> reduce -> update, returned

    Conservation, coordinate by coordinate and summed over ranks: update + residuals after =
    residuals before + gradients.

    place:  this rank's position in its node; it owns the shard of this number.
    shards: how many there are: as many as the smallest node has ranks. The ranks of a larger node
            from place `shards` on own an empty shard.
    inside, across: the transports among the ranks of this node, and among the owners of this shard;
            `across` is None for a rank that owns none.
    """

    def __init__(self, transport: Transport, nodes: Iterable[Sequence[int]] | None = None) -> None:
        ordered = find_nodes(transport) if nodes is None else checked_nodes(nodes, transport.size)
        node = next(node for node in ordered if transport.rank in node)
        self.place = node.index(transport.rank)
        self.shards = min(len(node) for node in ordered)
        self.inside = transport.subset(node)
        self.across = (
            transport.subset([node[self.place] for node in ordered])
            if self.place < self.shards
            else None
        )

    def shard(self, length: int) -> slice:
        """Return this rank's part of a vector of this length."""
        return slice(*self._bounds(length)[self.place : self.place + 2])

    def _bounds(self, length: int) -> list[int]:
        """Return the bounds of the parts that the node's ranks own."""
        # A larger node's further ranks get empty parts at the end.
        return shard_bounds(length, self.shards) + [length] * (self.inside.size - self.shards)

    def shard_k(self, k: int) -> int:
        """Return this rank's share of the k entries of an update; at least 1 if it owns a shard."""
        return max(1, shard_quota(k, self.shards, self.place)) if self.across else 0

    def scatter(self, dense: Array) -> Array:
        """Return the node's sum of this rank's shard, a view of `dense`, which is overwritten."""
        self.inside.reduce_scatter(dense, self._bounds(dense.size))
        return dense[self.shard(dense.size)]

    def reduce(
        self,
        selected: SparseVector,
        k: int,
        length: int,
        *,
        format: Format = EXACT,
        across: str = "gtopk",
        **options: Any,
    ) -> tuple[SparseVector, SparseVector]:
        """Return the update, of `length` elements, and the entries that return to this shard.

        selected: at most `shard_k(k)` entries of this rank's shard, of the shard's length.
        Raises NonFiniteError on all ranks alike.
        """
        inter_node = open_inter_node(across, format, options, k, length)
        shard = self.shard(length)
        empty = selected.take(slice(0))
        outcome = ReductionResult(empty, empty, empty)
        # All ranks of `across` own the same shard, so all of them reduce it, or none does.
        if self.across is not None and shard.start < shard.stop:
            k_out = max(1, shard_quota(inter_node.k_out, self.shards, self.place))
            outcome = inter_node.reduce(selected, self.shard_k(k), k_out, self.across, NOBODY)
        part = outcome.update.embed(shard.start, length)
        encoded = wire.encode(part, k, refused_by=outcome.refused_by, number=self.inside.begun)
        parts = wire.allgather(encoded.message, part, k, self.inside)
        update = sum_vectors([decoded.vector for decoded in parts])
        refused_by = lowest_refusing(*(decoded.refused_by for decoded in parts))
        return split_result(outcome._replace(update=update, refused_by=refused_by))


class _Step:
    """One reduction of sparse picks, divided into shards."""

    def __init__(
        self, selected: SparseVector, k: int, inter_node: InterNodeReduction, hierarchy: Hierarchy
    ) -> None:
        self.selected = selected
        self.k = k
        self.inter_node = inter_node
        self.hierarchy = hierarchy
        self.inside, self.place = hierarchy.inside, hierarchy.place
        self.number = self.inside.begun
        # So that every shard gets at least one of the k entries, and of the update's.
        self.shards = min(hierarchy.shards, k, inter_node.k_out)
        bounds = shard_bounds(selected.length, self.shards)
        picks, self.refused_by = check_finite(selected, self.inside.ranks[self.place])
        self.parts = [picks.index_range(a, b) for a, b in itertools.pairwise(bounds)]
        self.sends: list[Callable[[], None]] = []  # to wait for, after all receives

    def outcome(self) -> ReductionResult:
        """Send each shard's picks to its owner, reduce what this rank owns, collect the rest."""
        others = [shard for shard in range(self.shards) if shard != self.place]
        for shard in others:
            encoded = wire.encode(
                self.parts[shard], self.k, refused_by=self.refused_by, number=self.number
            )
            self.sends.append(self.inside.send(encoded.message, shard))
        outcomes = {}
        # First this rank's shard: other nodes wait for it, and so does this node.
        if self.place < self.shards:
            outcomes[self.place] = self._reduce_shard()
        for shard in others:
            outcomes[shard] = self._receive_outcome(shard)
        # Wait for sends last: a send may block until it is received, and all ranks send first.
        for sent in self.sends:
            sent()
        refused_by = lowest_refusing(*(outcome.refused_by for outcome in outcomes.values()))
        if refused_by != NOBODY:
            return refused_result(self.selected, refused_by)
        parts = [outcomes[shard] for shard in range(self.shards)]
        return ReductionResult(
            sum_vectors([part.update for part in parts]),
            sum_vectors([part.dropped_picks for part in parts]),
            sum_vectors([part.extra_returned for part in parts]),
        )

    def _reduce_shard(self) -> ReductionResult:
        """Sum the node's picks in this rank's shard, reduce them across, send the results back."""
        inside, place = self.inside, self.place
        part, refused_by = self.parts[place], self.refused_by
        lists = []
        for member in range(inside.size):
            if member == place:
                lists.append(part)
                continue
            decoded = wire.receive(member, part, self.k, inside)
            lists.append(decoded.vector)
            refused_by = lowest_refusing(refused_by, decoded.refused_by)
        k = shard_quota(self.k, self.shards, place)
        k_out = shard_quota(self.inter_node.k_out, self.shards, place)
        kept = part
        # Not for a node of one rank: then the result is that of the reduction across, bit for bit.
        if inside.size > 1:
            total, refused_by = check_finite(sum_by_index(lists), inside.ranks[place], refused_by)
            kept = merge(total, total.take(slice(0)), k)
        across = self.hierarchy.across
        assert across is not None  # this rank owns a shard
        outcome = self.inter_node.reduce(kept, k, k_out, across, refused_by)
        # If an entry of the node's sum was dropped, all picks of its index were.
        alive = kept.where(~contains(outcome.dropped_picks.indices, kept.indices))
        for member in range(inside.size):
            if member != place:
                bits = pack_alive(contains(alive.indices, lists[member].indices))
                encoded = wire.encode(
                    outcome.update,
                    self.k,
                    extra=bits,
                    refused_by=outcome.refused_by,
                    number=self.number,
                )
                self.sends.append(inside.send(encoded.message, member))
        return outcome._replace(dropped_picks=part.where(~contains(alive.indices, part.indices)))

    def _receive_outcome(self, shard: int) -> ReductionResult:
        """Return the outcome of this rank's picks in a shard, from the shard's owner."""
        part = self.parts[shard]
        update, bits, refused_by = wire.receive(
            shard, part, self.k, self.inside, extra_bytes=alive_bytes(part.entries)
        )
        dropped = part.where(~unpack_alive(bits, part.entries))
        # The shard's owner returns the rounding errors of the reduction across.
        return ReductionResult(update, dropped, part.take(slice(0)), refused_by)


def shard_bounds(length: int, shards: int) -> list[int]:
    """Return the bounds of the shards; the first shards get one of the remaining elements each.

    So does `shard_quota` with the remainder of k: no shard is shorter than its quota.
    """
    return [shard * (length // shards) + min(shard, length % shards) for shard in range(shards + 1)]


def shard_quota(count: int, shards: int, shard: int) -> int:
    """Return how many of `count` entries a shard gets; the first shards share the remainder."""
    return count // shards + (shard < count % shards)
