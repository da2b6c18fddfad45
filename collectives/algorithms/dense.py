"""dense: the transport's allreduce of every coordinate; the baseline, and the oracle of tests."""

from __future__ import annotations

from ..transports.transport import Transport
from ..vector import SparseVector


def reduce(
    selected: SparseVector, k: int, transport: Transport
) -> tuple[SparseVector, SparseVector]:
    """Sum every coordinate; nothing returns. k does not bound the update."""
    total = selected.to_dense()
    transport.allreduce(total)
    nothing = SparseVector.empty(selected.length, selected.values.dtype)
    return SparseVector.from_dense(total), nothing
