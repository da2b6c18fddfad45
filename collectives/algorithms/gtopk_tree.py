"""gtopk-tree: merges up a binomial tree to rank 0, and the result down again.

Shi et al. 2019, algorithm 3. Kept for comparison: twice the rounds of `gtopk`.

    P = 6     round 0       round 1       round 2       then down, in reverse
              1 -> 0        2 -> 0        4 -> 0        0 -> 4
              3 -> 2                                    0 -> 2
              5 -> 4                                    4 -> 5, 2 -> 3, 0 -> 1

The paper clears a pick whenever its index is in the final result, and so loses a pick that was
dropped on the way up but whose index came back through another branch. Here each message down
carries, behind the result, one bit for each entry of the list that came up that edge: still alive.
"""

from __future__ import annotations

import numpy as np

from .. import wire
from ..kernels import contains, merge
from ..transports.transport import Transport
from ..vector import SparseVector
from .alive import alive_bytes, pack_alive, unpack_alive


def reduce(
    selected: SparseVector, k: int, transport: Transport
) -> tuple[SparseVector, SparseVector]:
    """Reduce to rank 0 and broadcast; a rank's picks that fell out on the way return to it."""
    rank, size = transport.rank, transport.size
    merged = selected
    inputs: list[tuple[int, SparseVector, SparseVector]] = []  # child, its list, ours before
    distance = 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            child = rank + distance
            theirs = wire.decode(transport.receive(child), selected, k, child).vector
            inputs.append((child, theirs, merged))
            merged, _ = merge(merged, theirs, k)
        distance *= 2

    if rank == 0:
        update, alive = merged, np.ones(merged.entries, np.bool_)
    else:
        parent = rank - distance
        transport.send(wire.encode(merged, k).message, parent)()
        message = transport.receive(parent)
        bits = alive_bytes(merged.entries)
        update, extra, _ = wire.decode(message, selected, k, parent, extra_bytes=bits)
        alive = unpack_alive(extra, merged.entries)

    # Down the way it came: the last list merged is the first to learn its fate.
    for child, theirs, before in reversed(inputs):
        survivors = merged.indices[alive]
        child_alive = contains(survivors, theirs.indices)
        message = wire.encode(update, k, extra=pack_alive(child_alive)).message
        transport.send(message, child)()
        merged, alive = before, contains(survivors, before.indices)
    return update, selected.where(~alive)
