"""`gtopk bench collectives`, also beside how others exchange a top-k: two more baselines.

mpirun -n 4 python mpi_scripts/bench_collectives.py --json collectives.json

They are made of the collectives that come with MPI or gloo, called directly, so that their times
are the library's on this network:

plain-allgather     a top-k allgather of int32 + float32 pairs, added up by gtopk's kernel, so that
                    messages alone make the difference
published-tree      gTop-k as its authors published it (Shi et al. 2019): see `published_tree`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

# By path, Python would find no gtopk that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives.cost import rounds
from collectives.cost_model import Network, Rates
from collectives.kernels import merge, sum_by_index
from collectives.vector import Array, SparseVector
from gtopk.cli.bench.collectives import main
from gtopk.cli.bench.collectives.contenders import BASELINES, Contender, Modelled, Task, Update
from gtopk.cli.bench.collectives.library import ModelledLibrary

CALL: Final = "python mpi_scripts/bench_collectives.py"


def plain_allgather(
    selected: SparseVector, k: int, size: int, library: ModelledLibrary
) -> SparseVector:
    """Return the sum of all ranks' entries; ranks with fewer than k send zeros in addition."""
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
    library: ModelledLibrary,
    broadcast: Callable[[Array], None],
) -> SparseVector:
    """Reduce to rank 0 and broadcast, as the published code does.

    P = 6     1 -> 0, 3 -> 2, 5 -> 4   barrier   2 -> 0   barrier   4 -> 0   barrier   broadcast

    An entry has 16 bytes: index and value in one array become float64 both. A receiver adds up
    the two lists and keeps the k largest, here by gtopk's kernel. All ranks wait at a barrier after
    each round. Picks that were dropped on the way are lost where their index is in the result.
    (The published code works for powers of two only.)
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
    """Return uint8 [16 k]: the indices, then the values; zeros where there are fewer than k."""
    message = np.zeros((2, k))
    message[0, : vector.entries] = vector.indices
    message[1, : vector.entries] = vector.values
    return message.reshape(-1).view(np.uint8)


def of_sixteen_bytes(message: Array, like: SparseVector) -> SparseVector:
    """Return the entries of float64 [2, k], in the types of another vector."""
    # The rest is padding: no pick is a zero.
    indices, values = message[:, : np.count_nonzero(message[1])]
    return SparseVector(
        indices.astype(like.indices.dtype), values.astype(like.values.dtype), like.length
    )


def binomial_broadcast(message: Array, rank: int, size: int, library: ModelledLibrary) -> None:
    """Fill uint8 [m] with rank 0's: in each round every rank that has it sends it to another."""
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
        return lambda: plain_allgather(task.selected, task.k, size, task.library)

    def modelled(length: int, k: int, network: Network, rates: Rates) -> Modelled:
        alpha, beta, _ = network.link(1)
        ranks = network.ranks
        return Modelled(rounds(ranks) * alpha + (ranks - 1) * k * 8 * beta, 0.0)

    return Contender(
        "plain-allgather",
        "top-k allgather of int32 + float32 pairs by the library",
        prepare,
        modelled,
    )


def tree_contender(broadcast: str) -> Contender:
    def prepare(task: Task) -> Callable[[], Update]:
        rank, size, library = task.transport.rank, task.transport.size, task.library

        def spread(message: Array) -> None:
            if broadcast == "library":
                library.broadcast(message, 0)
            else:
                binomial_broadcast(message, rank, size, library)

        return lambda: published_tree(task.selected, task.k, rank, size, library, spread)

    def modelled(length: int, k: int, network: Network, rates: Rates) -> Modelled:
        alpha, beta, _ = network.link(1)
        steps = rounds(network.ranks)
        # Each of the log2 P rounds ends with a barrier, which takes as many messages.
        barriers = steps * steps * alpha
        return Modelled(barriers + 2 * steps * (alpha + 16 * k * beta), 0.0)

    return Contender(
        f"published-tree {broadcast}-broadcast",
        "published tree: 16-byte entries and barriers, "
        + ("the library's broadcast" if broadcast == "library" else "binomial broadcast"),
        prepare,
        modelled,
    )


PUBLISHED: Final = {
    "plain-allgather": (allgather_contender(),),
    "published-tree": (tree_contender("library"), tree_contender("binomial")),
}


if __name__ == "__main__":
    BASELINES.update(PUBLISHED)
    sys.exit(main(call=CALL))
