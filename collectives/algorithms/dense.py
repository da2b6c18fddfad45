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

    format: ignored; the values are sent as they are.
    """
    total = selected.to_dense()
    transport.allreduce(total)
    # The sum is not finite wherever a contribution is not, and every rank has the same sum, so no
    # message is needed to agree.
    if not all_finite(total):
        raise NonFiniteError(_lowest_nonfinite_rank(selected, transport))
    return SparseVector.from_dense(total), selected.take(slice(0))


def _lowest_nonfinite_rank(selected: SparseVector, transport: Transport) -> int | None:
    """Return the lowest rank whose contribution is not finite; None when only the sum is not."""
    lowest = np.array([transport.size if all_finite(selected.values) else transport.rank], np.int64)
    transport.allreduce(lowest, "min")
    return transport.ranks[int(lowest[0])] if lowest[0] < transport.size else None
