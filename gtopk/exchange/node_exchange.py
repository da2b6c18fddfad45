"""Node exchange: whole gradients are summed inside a node; picks of the sum go between nodes.

    ranks of a node   gradients --reduce-scatter--> each owns a shard of the node's sum
    owners            residual += shard, select ----gtopk or oktopk, between the nodes
    ranks of a node   update <--allgather---------- of all shards

(Shi et al. 2021, HiTopKComm.) The residual is as long as the vector, and not zero in this rank's
shard only. A checkpoint of other nodes, or of another number of ranks, may put entries elsewhere:
the first step that counts brings them to their owners, the velocity too.
"""

from __future__ import annotations

from collectives.algorithms import Hierarchy, find_nodes
from collectives.transports import Transport
from collectives.vector import SparseVector
from collectives.wire import Format

from ..compression import Hierarchical
from .buckets.buckets import Bucket
from .exchange import Progress, SparseExchange


class NodeExchange(SparseExchange):
    """Top-k of each node's dense sum, with error feedback; on the host only."""

    finds_nonfinite = False  # only the owner of the shard would find them

    def __init__(self, bucket: Bucket, compression: Hierarchical, progress: Progress) -> None:
        if bucket.device.type != "cpu":
            raise ValueError(
                f"Compression.hierarchical(inside='dense') works on the host, not on "
                f"{bucket.device}: use inside='picks' there"
            )
        super().__init__(bucket, compression, progress)
        self._length = bucket.length
        self._across = compression.across
        self._node_size = compression.node_size
        self._hierarchy: Hierarchy | None = None

    def _place(self, transport: Transport) -> tuple[Hierarchy, slice]:
        """Return the hierarchy, and this rank's shard of the vector."""
        if self._hierarchy is None:
            self._hierarchy = Hierarchy(transport, find_nodes(transport, self._node_size))
        return self._hierarchy, self._hierarchy.shard(self._length)

    def _select(self, bucket: Bucket, transport: Transport) -> SparseVector:
        hierarchy, own = self._place(transport)
        if self.residual.may_be_misplaced:
            self._move_to_owners(hierarchy)
        shard = hierarchy.scatter(bucket.gather())
        self.residual.is_empty = False
        # A short vector has no shard for every rank of a node.
        if not shard.size:
            return SparseVector.empty(0, shard.dtype)
        k = hierarchy.shard_k(self.k)
        return self.residual.accumulate_and_select(shard, k, where=own)

    @property
    def signature(self) -> str:
        """Return the options, and whether shards are to be brought home first."""
        # To bring them home is a collective: all ranks do so in the same step, or none does.
        return super().signature + (
            ", shards to be brought home" if self.residual.may_be_misplaced else ""
        )

    def _move_to_owners(self, hierarchy: Hierarchy) -> None:
        """Move the residuals of a node's ranks to the owners of the shards, and sum them there.

        Not by way of the gradients: momentum would take them a second time.
        """
        own = hierarchy.shard(self._length)
        # `arrays` keeps the old values beside, for a step that does not count.
        for array in self.residual.arrays():
            hierarchy.scatter(array)
            array[: own.start] = array[own.stop :] = 0

    def _own_part(self, rest: SparseVector, transport: Transport) -> SparseVector | None:
        """Return the part in this rank's shard; the first node keeps it, others none."""
        hierarchy, own = self._place(transport)
        if transport.ranks[0] not in hierarchy.inside.ranks:
            return None
        return rest.index_range(own.start, own.stop)

    def _reduce(
        self, picked: SparseVector, transport: Transport, format: Format
    ) -> tuple[SparseVector, SparseVector]:
        hierarchy, _ = self._place(transport)
        return hierarchy.reduce(
            picked, self.k, self._length, format=format, **{**self.options, "across": self._across}
        )

    def _remove_sent(
        self, picked: SparseVector, returned: SparseVector, update: SparseVector
    ) -> None:
        assert self._hierarchy is not None
        if picked.length:
            own = self._hierarchy.shard(self._length)
            part = update.index_range(own.start, own.stop)
            part = SparseVector(part.indices - own.start, part.values, picked.length)
            self.residual.remove_sent(picked, returned, part, where=own)
        self.residual.may_be_misplaced = False
