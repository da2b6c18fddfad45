"""Schedules: the messages of each algorithm, round by round, in entries and bytes.

Every list is taken to be full: k entries picked on every rank, and as many after a merge as it may
keep. Formulas: Shi et al. 2019, section II and table I, with the recursive doubling of `gtopk`.

    algorithm        rounds                        a rank sends
    dense            2 log2 P (Rabenseifner)       2(P-1)/P n values
                     2(P-1) (ring)
    topk-allgather   log2 P (Bruck)                (P-1) lists of k entries
    gtopk-tree       2 log2 P                      a list up, and one down to every child
    gtopk            log2 P, and 2 to fold         log2 P lists
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..algorithms.alive import alive_bytes
from ..cost import dense_bytes, rounds
from ..vector import Array


class Round(NamedTuple):
    """Messages that ranks send at the same time, and what becomes of the largest of them.

    senders: how many ranks send one.
    leaving: how many of those, on one node, send to other nodes; 0: all stay inside their node.
    lists:   sparse lists in a message, each with a header, of `entries` entries.
    plain_bytes: what else is in it: values without indices, bits, sizes.
    encoded, decoded, merged: entries that a rank encodes before it, decodes and merges after it.
    """

    senders: int
    leaving: int
    lists: int = 1
    entries: int = 0
    plain_bytes: float = 0.0
    encoded: int = 0
    decoded: int = 0
    merged: int = 0


class Order(NamedTuple):
    """What is to be reduced: k of `length` values of `value_bytes`, on `ranks` ranks."""

    length: int
    k: int
    ranks: int
    ranks_per_node: int = 1
    value_bytes: int = 4
    ring: bool = False


def leaving(sources: Array, targets: Array, ranks_per_node: int) -> int:
    """Return the most messages that leave one node, for messages from ranks to ranks (int [m])."""
    nodes = sources // ranks_per_node
    outside = nodes[nodes != targets // ranks_per_node]
    return int(np.bincount(outside).max()) if outside.size else 0


def leaving_by_shift(distance: int, ranks: int, ranks_per_node: int) -> int:
    """Return `leaving` where every rank r sends to r + distance mod P."""
    if ranks <= ranks_per_node:
        return 0
    return min(distance, ranks - distance, ranks_per_node)


def dense(order: Order) -> Iterator[Round]:
    """Yield an allreduce of all values: a ring's rounds, or the fewest there can be."""
    count = 2 * (order.ranks - 1) if order.ring else 2 * rounds(order.ranks)
    each = dense_bytes(order.length, order.ranks, order.value_bytes) / max(1, count)
    for _ in range(count):
        # One message leaves a node in each round of a ring, however many ranks it has.
        yield Round(
            order.ranks,
            leaving_by_shift(1, order.ranks, order.ranks_per_node),
            lists=0,
            plain_bytes=each,
        )


def topk_allgather(order: Order) -> Iterator[Round]:
    """Yield the rounds of Bruck's allgather; the lists are decoded and added up after the last."""
    k, ranks = order.k, order.ranks
    distance = 1
    while distance < ranks:
        lists = min(distance, ranks - distance)
        last = 2 * distance >= ranks
        yield Round(
            ranks,
            leaving_by_shift(distance, ranks, order.ranks_per_node),
            lists,
            entries=k,
            plain_bytes=8 * (1 + lists),
            encoded=k if distance == 1 else 0,
            decoded=ranks * k if last else 0,
            merged=ranks * k if last else 0,
        )
        distance *= 2


def gtopk_tree(order: Order) -> Iterator[Round]:
    """Yield the merges up to rank 0, then the result down, in reverse."""
    k, ranks = order.k, order.ranks
    up = []
    distance = 1
    while distance < ranks:
        sources = np.arange(distance, ranks, 2 * distance)
        outside = leaving(sources, sources - distance, order.ranks_per_node)
        up.append(Round(sources.size, outside, 1, k, encoded=k, decoded=k, merged=2 * k))
        distance *= 2
    yield from up
    for step in reversed(up):
        yield step._replace(plain_bytes=alive_bytes(k), merged=0)


def gtopk(order: Order) -> Iterator[Round]:
    """Yield recursive doubling; ranks beyond the largest power of two are folded in and out."""
    k, ranks = order.k, order.ranks
    paired = 1 << (ranks.bit_length() - 1)
    everyone, guests = np.arange(paired), np.arange(paired, ranks)
    fold = Round(
        guests.size,
        leaving(guests, guests - paired, order.ranks_per_node),
        1,
        k,
        encoded=k,
        decoded=k,
        merged=2 * k,
    )
    if guests.size:
        yield fold
    distance = 1
    while distance < paired:
        outside = leaving(everyone, everyone ^ distance, order.ranks_per_node)
        yield Round(paired, outside, 1, k, encoded=k, decoded=k, merged=2 * k)
        distance *= 2
    if guests.size:
        yield fold._replace(plain_bytes=alive_bytes(k), merged=0)


SCHEDULES: dict[str, Callable[[Order], Iterator[Round]]] = {
    "dense": dense,
    "topk-allgather": topk_allgather,
    "gtopk-tree": gtopk_tree,
    "gtopk": gtopk,
}
