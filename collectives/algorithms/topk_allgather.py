"""topk-allgather: everyone's picks to everyone; the update is their union.

Each rank sends P-1 lists of k entries, and updates up to k P coordinates.
"""

from __future__ import annotations

from .. import wire
from ..kernels import sum_by_index
from ..transports.transport import Transport
from ..vector import SparseVector


def reduce(
    selected: SparseVector, k: int, transport: Transport
) -> tuple[SparseVector, SparseVector]:
    """Sum the ranks' lists, in rank order; nothing returns. k does not bound the update."""
    messages = transport.allgather(wire.encode(selected, k).message)
    lists = [wire.decode(m, selected, k, rank).vector for rank, m in enumerate(messages)]
    nothing = SparseVector.empty(selected.length, selected.values.dtype)
    return sum_by_index(lists), nothing
