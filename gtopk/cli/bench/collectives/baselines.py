"""Baselines: what gtopk is measured against, made of the library's own collectives.

dense-library       the library's own allreduce of every coordinate
plain-allgather     its allgather of the k entries of every rank, int32 and float32: 8 bytes; they
                    are added up by gtopk's kernel, so that messages alone make the difference
published-tree      gTop-k as its authors published it (Shi et al. 2019): see `published_tree`
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collectives.kernels import sum_by_index
from collectives.vector import Array, SparseVector

from .library import Library


def plain_allgather(selected: SparseVector, k: int, size: int, library: Library) -> SparseVector:
    """Return the sum of all ranks' entries; those who have fewer than k send zeros along."""
    message = np.zeros((2, k), np.int32)
    message[0, : selected.entries] = selected.indices
    message[1, : selected.entries] = selected.values.view(np.int32)
    gathered = library.allgather(message.reshape(-1).view(np.uint8)).view(np.int32)
    lists = []
    for indices, bits in gathered.reshape(size, 2, k):
        entries = np.count_nonzero(bits)
        values = bits[:entries].view(np.float32)
        lists.append(SparseVector(indices[:entries], values, selected.length))
    return sum_by_index(lists)


def summed(indices: Array, values: Array, length: int) -> SparseVector:
    """Return entries with equal indices added up, and those that are zero left out."""
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    first = np.flatnonzero(np.diff(indices, prepend=-1))
    sums = np.add.reduceat(values, first) if first.size else values
    kept = np.flatnonzero(sums)
    return SparseVector(indices[first][kept], sums[kept], length)


def published_tree(
    selected: SparseVector,
    k: int,
    rank: int,
    size: int,
    library: Library,
    broadcast: Callable[[Array], None],
) -> SparseVector:
    """Reduce to rank 0 and broadcast, as the published code does.

    P = 6     1 -> 0, 3 -> 2, 5 -> 4   barrier   2 -> 0   barrier   4 -> 0   barrier   broadcast

    An entry has 16 bytes: index and value in one array become float64 both. A receiver adds up
    the two lists and keeps the k largest. All ranks wait at a barrier after each round. Picks that
    were dropped on the way are lost where their index is in the result; what returns to the
    residual is left out here. (The published code works for powers of two only.)
    """
    indices, values = selected.indices, selected.values
    distance = 1
    while distance < size:
        if rank % (2 * distance) == 0 and rank + distance < size:
            buffer = np.empty((2, k))
            library.receive(buffer.reshape(-1).view(np.uint8), rank + distance)
            theirs = summed(buffer[0].astype(np.int64), buffer[1].astype(np.float32), 0)
            indices, values = largest(
                np.concatenate([indices, theirs.indices]),
                np.concatenate([values, theirs.values]),
                k,
            )
        elif rank % (2 * distance) == distance:
            library.send(of_sixteen_bytes(indices, values, k).view(np.uint8), rank - distance)
        library.barrier()
        distance *= 2
    result = of_sixteen_bytes(indices, values, k)
    broadcast(result.view(np.uint8))
    indices, values = result.reshape(2, k)
    return summed(indices.astype(np.int32), values.astype(np.float32), selected.length)


def of_sixteen_bytes(indices: Array, values: Array, k: int) -> Array:
    """Return float64 [2 k]: the indices, then the values; zeros where there are fewer than k."""
    message = np.zeros((2, k))
    message[0, : indices.size] = indices
    message[1, : values.size] = values
    return message.reshape(-1)


def largest(indices: Array, values: Array, k: int) -> tuple[Array, Array]:
    """Return the k entries of the largest sums."""
    total = summed(indices, values, 0)
    if total.entries <= k:
        return total.indices, total.values
    kept = np.sort(np.argpartition(-np.abs(total.values), k)[:k])
    return total.indices[kept], total.values[kept]


def binomial_broadcast(message: Array, rank: int, size: int, library: Library) -> None:
    """Fill uint8 [m] with rank 0's: in each round all who have it send it to one who has not."""
    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance:
        if rank % (2 * distance) == 0 and rank + distance < size:
            library.send(message, rank + distance)
        elif rank % (2 * distance) == distance:
            library.receive(message, rank - distance)
        distance //= 2
