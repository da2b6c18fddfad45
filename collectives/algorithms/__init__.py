"""Sparse reductions: one signature, one promise.

    reduce(selected, k, transport, format=..., **options of the algorithm) -> (update, returned)

selected: this rank's picks, at most k entries, of the same length and dtype on every rank.
update:   the agreed vector, bit-identical on all ranks.
returned: what this rank must add back to its residual.

The promise is conservation: coordinate by coordinate, the sum over ranks of `selected` equals
`update` plus the sum over ranks of `returned`, up to the rounding of the additions. It holds for
any number of ranks, any k, any overlap, ties, zeros and empty contributions, and in formats that
round.

NaN or infinity on any rank, or in the sum, raises NonFiniteError on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from ..errors import NonFiniteError
from ..transports.transport import Transport
from ..vector import SparseVector, check, is_on_device
from ..wire import EXACT, Format
from ..wire.format import ON_DEVICE as FORMATS_ON_DEVICE
from ..wire.format import check as check_format
from . import dense, gtopk, gtopk_tree, hierarchical, oktopk, topk_allgather
from .hierarchical import Hierarchy, find_nodes
from .options import check_names
from .regions import Regions

__all__ = [
    "ALGORITHMS",
    "ON_DEVICE",
    "Hierarchy",
    "Reduce",
    "Regions",
    "find_nodes",
    "reduce",
    "reduce_where_supported",
]


class Reduce(Protocol):
    """An algorithm's signature; its options are further keyword arguments."""

    def __call__(
        self, selected: SparseVector, k: int, transport: Transport, *, format: Format = EXACT
    ) -> tuple[SparseVector, SparseVector]: ...


ALGORITHMS: Final[dict[str, Reduce]] = {
    "dense": dense.reduce,
    "topk-allgather": topk_allgather.reduce,
    "gtopk-tree": gtopk_tree.reduce,
    "gtopk": gtopk.reduce,
    "oktopk": oktopk.reduce,
    "hierarchical": hierarchical.reduce,
}

# Algorithms that keep their lists on the GPU; the host reads only headers, sizes and flags.
ON_DEVICE: Final = frozenset({"dense", "topk-allgather", "gtopk-tree", "gtopk"})


def reduce(
    selected: SparseVector,
    k: int,
    transport: Transport,
    algorithm: str = "gtopk",
    *,
    format: Format = EXACT,
    **options: Any,
) -> tuple[SparseVector, SparseVector]:
    """Reduce the ranks' selected entries: check the arguments, then run the named algorithm.

    Every rank passes the same k, format and options. The results share no memory with `selected`.
    Reductions on distinct channels of a transport may run at the same time, each in a thread.

    If every rank passes CuPy arrays, the results are CuPy arrays on the same GPU. The reduction
    itself stays on the GPU if the transport sends from it (NCCL, once connected), the algorithm is
    in `ON_DEVICE` and the GPU codes the format: indices raw or in blocks, values exact, in 16 bits,
    or in 2 to 4. Otherwise the vectors are copied to the host, and ranks without a GPU may take
    part.

    Raises ValueError for an unknown algorithm, option or format, an option out of bounds, k outside
    1..length, more than k entries, or an invalid `selected`; TypeError if its values are not a
    NumPy or CuPy array; NonFiniteError, on all ranks alike, for NaN or infinity in any rank's
    `selected` or in the sum; MessageError when a peer's message is malformed, and PeerError when a
    peer is gone.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    check_names(algorithm, ALGORITHMS[algorithm], options)
    run = partial(
        _reduce, k=k, transport=transport, algorithm=algorithm, format=format, options=options
    )
    return reduce_where_supported(run, selected, transport, algorithm, format)


def reduce_where_supported(
    reduction: Callable[[SparseVector], tuple[SparseVector, SparseVector]],
    selected: SparseVector,
    transport: Transport,
    algorithm: str,
    format: Format,
) -> tuple[SparseVector, SparseVector]:
    """Run a reduction on the device of `selected` if it can run there, else on the host.

    GPU     selected                         update, returned
               | copy                               ^ copy
    host       +--> reduction among the hosts ------+
    """
    if not is_on_device(selected.values):
        return reduction(selected)
    with selected.values.device:  # type: ignore[attr-defined]
        if algorithm in ON_DEVICE and format in FORMATS_ON_DEVICE:  # on every rank, or on none
            # A transport knows only once it is connected whether it sends from the GPU.
            transport.connect()
            if transport.sends_from_device:
                return reduction(selected)
        # The GPU's current stream orders the copies.
        update, returned = reduction(selected.on_host())
        return update.beside(selected.values), returned.beside(selected.values)


def _reduce(
    selected: SparseVector,
    k: int,
    transport: Transport,
    algorithm: str,
    format: Format,
    options: dict[str, Any],
) -> tuple[SparseVector, SparseVector]:
    check(selected)
    if not 1 <= k <= selected.length:
        raise ValueError(f"k must lie in 1..{selected.length} (the vector's length), got {k}")
    if selected.entries > k:
        raise ValueError(f"at most k = {k} entries may be selected, got {selected.entries}")
    check_format(format)
    refusal: Exception
    with (
        transport.operation(f"a reduction by {algorithm}"),
        np.errstate(over="ignore", invalid="ignore"),  # an overflow raises NonFiniteError instead
    ):
        try:
            return ALGORITHMS[algorithm](selected, k, transport, format=format, **options)
        except (NonFiniteError, ValueError) as error:
            # Raised only after the operation is complete, on every rank alike. (An option out of
            # bounds is found before anything is sent.)
            refusal = error
    raise refusal
