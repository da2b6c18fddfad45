"""topk-allgather: every rank sends its picks to every other; the update is the sum of them all.

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
    refused_result,
    rounding_error,
    split_result,
)


def reduce(
    selected: SparseVector, k: int, transport: Transport, *, format: Format = EXACT
) -> tuple[SparseVector, SparseVector]:
    """Sum the ranks' lists, in rank order; only rounding returns. k does not bound the update."""
    ranks = transport.ranks
    picks, refused_by = check_finite(selected, ranks[transport.rank])
    encoded = wire.encode(picks, k, format, refused_by=refused_by, number=transport.begun)
    lists = wire.allgather(encoded.message, selected, k, transport, format)
    update = sum_by_index([decoded.vector for decoded in lists])
    refused_by = lowest_refusing(*(decoded.refused_by for decoded in lists))
    # Every rank has the same sum: if it is not finite, the lowest rank is named.
    update, refused_by = check_finite(update, ranks[0], refused_by)
    if refused_by != wire.NOBODY:
        return split_result(refused_result(selected, refused_by))
    error = rounding_error(picks, encoded.vector, format)
    return split_result(ReductionResult(update, selected.take(slice(0)), error))
