"""dense: the transport's allreduce of every coordinate; the baseline, and the oracle of tests."""

from __future__ import annotations

import numpy as np

from ..errors import NonFiniteError
from ..kernels import all_finite
from ..transports.transport import Transport
from ..vector import SparseVector
from ..wire import EXACT, Format


def reduce(
    selected: SparseVector, k: int, transport: Transport, *, format: Format = EXACT
) -> tuple[SparseVector, SparseVector]:
    """Sum every coordinate; nothing returns. k does not bound the update.

    format: of sparse messages; there are none here, values travel as they are.
    """
    total = selected.to_dense()
    transport.allreduce(total)
    # Only the sum is examined: it is not finite where a contribution is not, and all ranks see that
    # alike, with no message.
    if not all_finite(total):
        raise NonFiniteError(_lowest_that_is_not_finite(selected, transport))
    return SparseVector.from_dense(total), selected.take(slice(0))


def _lowest_that_is_not_finite(selected: SparseVector, transport: Transport) -> int | None:
    """Return the lowest rank whose contribution is not finite; None when only the sum is not."""
    place = transport.size if all_finite(selected.values) else transport.rank
    places = np.array([place], np.int64)
    transport.allreduce(places, "min")
    return transport.ranks[int(places[0])] if places[0] < transport.size else None
