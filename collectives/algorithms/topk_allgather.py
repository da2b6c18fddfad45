"""topk-allgather: everyone's picks to everyone; the update is their union.

Each rank sends P-1 lists of k entries, and updates up to k P coordinates.
"""

from __future__ import annotations

from .. import wire
from ..kernels import sum_by_index
from ..transports.transport import Transport
from ..vector import SparseVector
from ..wire import EXACT, Format
from .conservation import (
    ReductionResult,
    check_finite,
    lowest_refusing,
    refused,
    rounding_error,
    split_result,
)


def reduce(
    selected: SparseVector, k: int, transport: Transport, *, format: Format = EXACT
) -> tuple[SparseVector, SparseVector]:
    """Sum the ranks' lists, in rank order; only rounding returns. k does not bound the update."""
    ranks, number = transport.ranks, transport.begun
    picks, refused_by = check_finite(selected, ranks[transport.rank])
    encoded = wire.encode(picks, k, format, refused_by=refused_by, number=number)
    messages = transport.allgather(encoded.message)
    lists = [
        wire.decode(message, selected, k, sender, format, number=number)
        for message, sender in zip(messages, ranks, strict=True)
    ]
    update = sum_by_index([decoded.vector for decoded in lists])
    # All ranks see that the sum is not finite; so the lowest of them is named as its finder.
    update, refused_by = check_finite(
        update, ranks[0], lowest_refusing(*(d.refused_by for d in lists))
    )
    if refused_by != wire.NOBODY:
        return split_result(refused(selected, refused_by))
    error = rounding_error(picks, encoded.vector, format)
    return split_result(ReductionResult(update, selected.take(slice(0)), error))
