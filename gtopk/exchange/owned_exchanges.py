"""Sparse exchanges in which each entry of the sum has an owner: ShardExchange and NodeExchange.

ShardExchange: in each step all ranks send one shard of their residuals in full, the same shard on
all ranks.

    step t     residual += gradient
               values of shard t mod period --collectives.algorithms.shards--> update
               residual of the shard = rounding errors of this rank's values
               owner error of this rank's part = rounding error of the sum, sent next time

The conservation law, per coordinate and summed over ranks: update + residuals + owner errors after
= residuals + owner errors before + gradients.

Owner errors are a vector as long as the residual, nonzero only in this rank's parts of all shards.
A checkpoint from another number of ranks, or with other buckets, may place them elsewhere: the
first step that counts moves them to their owners.

NodeExchange: whole gradients are summed inside a node; picks of the sum go between nodes.

    ranks of a node   gradients --reduce-scatter--> each owns a shard of the node's sum
    owners            residual += shard, select ----gtopk or oktopk, between the nodes
    ranks of a node   update <--allgather---------- of all shards

(Shi et al. 2021, HiTopKComm.) The residual is as long as the vector, but nonzero only in this
rank's shard. A checkpoint with other nodes, or another number of ranks, may place entries
elsewhere: the first step that counts moves them, and the velocity, to their owners.
"""

from __future__ import annotations

import numpy as np

from collectives.algorithms import Hierarchy, find_nodes, shards
from collectives.kernels import all_finite
from collectives.transports import Transport
from collectives.vector import Array, SparseVector, module_of
from collectives.wire import Format

from ..compression import Hierarchical, Shards
from .buckets.buckets import Bucket
from .exchange import Progress, SparseExchange, open_residual


class ShardExchange(SparseExchange):
    """`Compression.shards`: error feedback for a rank's values and for the owners' sums."""

    compression: Shards

    def __init__(self, bucket: Bucket, compression: Shards, progress: Progress) -> None:
        residual = open_residual(bucket, compression, has_owner_errors=True)
        super().__init__(bucket, compression, progress, residual)
        self._is_nonfinite = False
        self._owned: tuple[Array, Array] | None = None  # indices, and the new owner errors there

    @property
    def signature(self) -> str:
        """Return the options, and whether owner errors are misplaced.

        The shard's number is sent in the messages instead: a signature that changes in every step
        would have to be announced in full each time.
        """
        if self.residual.may_be_misplaced:
            return super().signature + ", owner errors to be moved to their owners"
        return super().signature

    @property
    def _shard(self) -> int:
        """Return the number of the shard that is sent in this step."""
        return self._progress.steps % self.compression.period

    def _select(self, bucket: Bucket, transport: Transport) -> SparseVector:
        if self.residual.may_be_misplaced:
            self._move_to_owners(transport)
        gradient = bucket.flat if self.residual.has_moments else bucket.gather()
        self.residual.accumulate(gradient)
        # All of it: NaN or infinity outside this shard would stay once this step has counted.
        self._is_nonfinite = not all_finite(self.residual.values)
        indices = self._indices(self._shard)
        return SparseVector(indices, self.residual.values[indices], bucket.length)

    def _indices(self, shard: int) -> Array:
        return shards.shard_indices(shard, self.compression.period, self.residual.values)

    def _reduce(
        self, picked: SparseVector, transport: Transport, format: Format
    ) -> tuple[SparseVector, SparseVector]:
        own = picked.indices[shards.own_part(picked.entries, transport)]
        on_host = picked.on_host()
        errors = self.residual.owner_errors[own]
        shared = shards.reduce(
            on_host.values,
            _on_host(errors),
            transport,
            shard=self._shard,
            code=format.values,
            refuses=self._is_nonfinite,
        )
        self._owned = own, module_of(picked.values).asarray(shared.kept)
        update, returned = (
            on_host._replace(values=shared.update),
            on_host._replace(values=shared.lost),
        )
        return update.beside(picked.values), returned.beside(picked.values)

    def _remove_sent(
        self, picked: SparseVector, returned: SparseVector, update: SparseVector
    ) -> None:
        super()._remove_sent(picked, returned, update)
        assert self._owned is not None
        self.residual.keep_owner_errors(*self._owned)
        # Only now: undoing a step restores the misplaced errors, which must be moved again.
        self.residual.may_be_misplaced = False
        self._owned = None

    def _move_to_owners(self, transport: Transport) -> None:
        """Move all ranks' owner errors to the owners of the parts, and sum them there."""
        errors = self.residual.owner_errors
        has_errors = np.array([bool(errors.any())], np.uint8)
        # All ranks get the same answer, so all skip the sums or none does.
        if not any(message.any() for message in transport.allgather(has_errors)):
            return
        for shard in range(self.compression.period):
            indices = self._indices(shard)
            values = _on_host(errors[indices])
            own = shards.own_part(values.size, transport)
            with transport.operation("moving owner errors to their owners"):
                total, _, _ = shards.to_owners(values, transport)
            values = np.zeros_like(values)
            values[own] = total
            self.residual.keep_owner_errors(indices, module_of(errors).asarray(values))
            # Read again: the first write in a step swaps the two buffers.
            errors = self.residual.owner_errors


def _on_host(array: Array) -> Array:
    """Return a NumPy array: the array itself, or a copy from the GPU, after waiting for it."""
    return array if isinstance(array, np.ndarray) else array.get()


class NodeExchange(SparseExchange):
    """Top-k of each node's dense sum, with error feedback. Raises ValueError on a GPU."""

    compression: Hierarchical
    finds_nonfinite = False  # only the shard's owner would find them

    def __init__(self, bucket: Bucket, compression: Hierarchical, progress: Progress) -> None:
        if bucket.device.type != "cpu":
            raise ValueError(
                f"Compression.hierarchical(inside='dense') works on the host, not on "
                f"{bucket.device}: use inside='picks' there"
            )
        super().__init__(bucket, compression, progress)
        self._length = bucket.length
        self._hierarchy: Hierarchy | None = None

    def _locate(self, transport: Transport) -> tuple[Hierarchy, slice]:
        """Return the hierarchy, and this rank's shard of the vector."""
        if self._hierarchy is None:
            self._hierarchy = Hierarchy(
                transport, find_nodes(transport, self.compression.node_size)
            )
        return self._hierarchy, self._hierarchy.shard(self._length)

    def _select(self, bucket: Bucket, transport: Transport) -> SparseVector:
        hierarchy, own = self._locate(transport)
        if self.residual.may_be_misplaced:
            self._move_to_owners(hierarchy)
        shard = hierarchy.scatter(bucket.gather())
        self.residual.is_empty = False
        # A short vector does not have a shard for every rank of a node.
        if not shard.size:
            return SparseVector.empty(0, shard.dtype)
        k = hierarchy.shard_k(self.k)
        return self.residual.accumulate_and_select(shard, k, where=own)

    @property
    def signature(self) -> str:
        """Return the options, and whether shards must first be moved to their owners."""
        # Moving is a collective: all ranks do it in the same step, or none does.
        return super().signature + (
            ", shards to be moved to their owners" if self.residual.may_be_misplaced else ""
        )

    def _move_to_owners(self, hierarchy: Hierarchy) -> None:
        """Move the residuals of a node's ranks to the owners of the shards, and sum them there.

        Bypass the gradients: momentum would be applied to them a second time.
        """
        own = hierarchy.shard(self._length)
        # `arrays` keeps the old values in the second buffer, in case the step does not count.
        for array in self.residual.arrays():
            hierarchy.scatter(array)
            array[: own.start] = array[own.stop :] = 0

    def _own_part(self, rest: SparseVector, transport: Transport) -> SparseVector | None:
        """Return the part in this rank's shard on the first node; None on the others."""
        hierarchy, own = self._locate(transport)
        if transport.ranks[0] not in hierarchy.inside.ranks:
            return None
        return rest.index_range(own.start, own.stop)

    def _reduce(
        self, picked: SparseVector, transport: Transport, format: Format
    ) -> tuple[SparseVector, SparseVector]:
        hierarchy, _ = self._locate(transport)
        return hierarchy.reduce(picked, self.k, self._length, format=format, **self.options)

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
