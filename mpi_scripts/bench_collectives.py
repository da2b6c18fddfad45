"""`gtopk bench collectives` with two more baselines: how others exchange a top-k.

mpirun -n 4 python mpi_scripts/bench_collectives.py --json collectives.json

The baselines call MPI's or gloo's own collectives directly, so that they take the library's time on
this network:

plain-allgather     a top-k allgather of int32 + float32 pairs, summed by gtopk's kernel, so that
                    only the messages differ
published-tree      gTop-k as its authors published it (Shi et al. 2019): see `published_tree`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as distributed

# Run by its path, a script does not find a gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.cost import rounds
from collectives.kernels import merge, sum_by_index
from collectives.transports import Transport
from collectives.vector import Array, SparseVector
from gtopk.cli.bench.collectives import main
from gtopk.cli.bench.collectives.contenders import (
    BASELINES,
    Contender,
    Modelled,
    Place,
    Task,
    Update,
)
from gtopk.cli.bench.collectives.library import ModelledLibrary

CALL: Final = "python mpi_scripts/bench_collectives.py"


class Collectives:
    """More of a library's blocking collectives, on arrays in the host's memory.

    Only messages of `send` can be counted. An allgather and a broadcast count as the least
    possible: one copy for each rank that lacks it.
    """

    def __init__(self, library: ModelledLibrary, rank: int) -> None:
        self._library, self._group = library, library.group
        self._rank, self._size = rank, library.size

    def allgather(self, message: Array) -> Array:
        """Return uint8 [P m]: uint8 [m] of each rank, in rank order."""
        group, gathered = self._group, np.empty((self._size, message.size), np.uint8)
        if isinstance(group, Transport):
            np.stack(group.allgather(message), out=gathered)
        elif isinstance(group, distributed.ProcessGroup):
            rows = list(torch.from_numpy(gathered))
            distributed.all_gather(rows, torch.from_numpy(message), group=group)
        else:
            group.Allgather(message, gathered)
        self._library.traffic.count((self._size - 1) * message.size, self._library.rounds)
        return gathered.reshape(-1)

    def send(self, message: Array, to: int) -> None:
        """Send uint8 [m]."""
        group = self._group
        if isinstance(group, Transport):
            group.send(message, to)()
        elif isinstance(group, distributed.ProcessGroup):
            to = distributed.get_global_rank(group, to)
            distributed.send(torch.from_numpy(message), to, group=group)
        else:
            group.Send(message, to)
        self._library.traffic.count(message.size)

    def receive(self, message: Array, source: int) -> None:
        """Fill uint8 [m] with a message of a rank."""
        group = self._group
        if isinstance(group, Transport):
            np.copyto(message, group.receive(source))
        elif isinstance(group, distributed.ProcessGroup):
            source = distributed.get_global_rank(group, source)
            distributed.recv(torch.from_numpy(message), source, group=group)
        else:
            group.Recv(message, source)

    def broadcast(self, message: Array, root: int) -> None:
        """Fill uint8 [m] with the root's."""
        group = self._group
        if isinstance(group, Transport):
            np.copyto(message, group.broadcast(message, root))
        elif isinstance(group, distributed.ProcessGroup):
            source = distributed.get_global_rank(group, root)
            distributed.broadcast(torch.from_numpy(message), source, group=group)
        else:
            group.Bcast(message, root)
        # As if each rank passed it on to the next: the last one sends nothing.
        if (self._rank + 1) % self._size != root:
            self._library.traffic.count(message.size)

    def barrier(self) -> None:
        """Wait for all ranks."""
        group = self._group
        if isinstance(group, distributed.ProcessGroup):
            distributed.barrier(group=group)
        elif isinstance(group, Transport):
            group.barrier()
        else:
            group.Barrier()
        self._library.traffic.count(0, self._library.rounds)


def plain_allgather(
    selected: SparseVector, k: int, size: int, library: Collectives
) -> SparseVector:
    """Return the sum of all ranks' entries; ranks with fewer than k pad with zeros."""
    message = np.zeros((2, k), np.int32)
    message[0, : selected.entries] = selected.indices
    message[1, : selected.entries] = selected.values.view(np.int32)
    gathered = library.allgather(message.reshape(-1).view(np.uint8)).view(np.int32)
    lists = []
    for indices, bits in gathered.reshape(size, 2, k):
        # The rest is padding: no pick is a zero.
        entries = np.count_nonzero(bits)
        values = bits[:entries].view(np.float32)
        lists.append(SparseVector(indices[:entries], values, selected.length))
    return sum_by_index(lists)


def published_tree(
    selected: SparseVector,
    k: int,
    rank: int,
    size: int,
    library: Collectives,
    broadcast: Callable[[Array], None],
) -> SparseVector:
    """Reduce to rank 0 and broadcast, as the published code does.

    P = 6     1 -> 0, 3 -> 2, 5 -> 4   barrier   2 -> 0   barrier   4 -> 0   barrier   broadcast

    An entry has 16 bytes: in one array, index and value both become float64. A receiver sums the
    two lists and keeps the k largest, here with gtopk's kernel. All ranks wait at a barrier after
    each round. A pick that was dropped on the way is lost if its index is in the result. (The
    published code only works for powers of two.)
    """
    kept = selected
    distance = 1
    while distance < size:
        if rank % (2 * distance) == 0 and rank + distance < size:
            buffer = np.empty((2, k))
            library.receive(buffer.reshape(-1).view(np.uint8), rank + distance)
            kept = merge(kept, of_sixteen_bytes(buffer, selected), k)
        elif rank % (2 * distance) == distance:
            library.send(in_sixteen_bytes(kept, k), rank - distance)
        library.barrier()
        distance *= 2
    result = in_sixteen_bytes(kept, k)
    broadcast(result)
    return of_sixteen_bytes(result.view(np.float64).reshape(2, k), selected)


def in_sixteen_bytes(vector: SparseVector, k: int) -> Array:
    """Return uint8 [16 k]: the indices, then the values; padded with zeros to k."""
    message = np.zeros((2, k))
    message[0, : vector.entries] = vector.indices
    message[1, : vector.entries] = vector.values
    return message.reshape(-1).view(np.uint8)


def of_sixteen_bytes(message: Array, like: SparseVector) -> SparseVector:
    """Return the entries of float64 [2, k], with another vector's types."""
    # The rest is padding: no pick is a zero.
    indices, values = message[:, : np.count_nonzero(message[1])]
    return SparseVector(
        indices.astype(like.indices.dtype), values.astype(like.values.dtype), like.length
    )


def binomial_broadcast(message: Array, rank: int, size: int, library: Collectives) -> None:
    """Fill uint8 [m] with rank 0's: in each round, every rank that has it sends it to another."""
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance:
        if rank % (2 * distance) == 0 and rank + distance < size:
            library.send(message, rank + distance)
        elif rank % (2 * distance) == distance:
            library.receive(message, rank - distance)
        distance //= 2


def allgather_contender() -> Contender:
    def prepare(task: Task) -> Callable[[], Update]:
        size = task.transport.size
        library = Collectives(task.library, task.transport.rank)
        return lambda: plain_allgather(task.selected, task.k, size, library)

    def modelled(at: Place) -> Modelled:
        alpha, beta, _ = at.network.link(1)
        ranks = at.network.ranks
        return Modelled(rounds(ranks) * alpha + (ranks - 1) * at.k * 8 * beta, 0.0)

    label = "top-k allgather of int32 + float32 pairs by the library"
    return Contender("plain-allgather", label, prepare, modelled)


def tree_contender(broadcast: str) -> Contender:
    def prepare(task: Task) -> Callable[[], Update]:
        rank, size = task.transport.rank, task.transport.size
        library = Collectives(task.library, rank)

        def spread(message: Array) -> None:
            if broadcast == "library":
                library.broadcast(message, 0)
            else:
                binomial_broadcast(message, rank, size, library)

        return lambda: published_tree(task.selected, task.k, rank, size, library, spread)

    def modelled(at: Place) -> Modelled:
        alpha, beta, _ = at.network.link(1)
        steps = rounds(at.network.ranks)
        # Each of the log2 P rounds ends with a barrier, which takes as many messages.
        barriers = steps * steps * alpha
        return Modelled(barriers + 2 * steps * (alpha + 16 * at.k * beta), 0.0)

    kind = "the library's" if broadcast == "library" else "binomial"
    label = f"published tree: 16-byte entries and barriers, {kind} broadcast"
    return Contender(f"published-tree {broadcast}-broadcast", label, prepare, modelled)


PUBLISHED: Final = {
    "plain-allgather": (allgather_contender(),),
    "published-tree": (tree_contender("library"), tree_contender("binomial")),
}


if __name__ == "__main__":
    BASELINES.update(PUBLISHED)
    sys.exit(main(call=CALL))
