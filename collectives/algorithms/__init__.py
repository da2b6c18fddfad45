"""Sparse reductions: one signature, one promise.

    reduce(selected, k, transport) -> (update, returned)

selected: this rank's picks, at most k entries, of the same length and dtype on every rank.
update:   the agreed vector, bit-identical on all ranks.
returned: what this rank must add back to its residual.

The promise is conservation: coordinate by coordinate, the sum over ranks of `selected` equals
`update` plus the sum over ranks of `returned`, up to the rounding of the additions, for any number
of ranks, any k, any overlap, ties, zeros and empty contributions.
"""

from __future__ import annotations

from typing import Final, Protocol

from ..transports.transport import Transport
from ..vector import SparseVector, check
from . import dense, gtopk, gtopk_tree, topk_allgather


class Reduce(Protocol):
    """What every algorithm is."""

    def __call__(
        self, selected: SparseVector, k: int, transport: Transport
    ) -> tuple[SparseVector, SparseVector]: ...


ALGORITHMS: Final[dict[str, Reduce]] = {
    "dense": dense.reduce,
    "topk-allgather": topk_allgather.reduce,
    "gtopk-tree": gtopk_tree.reduce,
    "gtopk": gtopk.reduce,
}


def reduce(
    selected: SparseVector, k: int, transport: Transport, algorithm: str = "gtopk"
) -> tuple[SparseVector, SparseVector]:
    """Reduce the ranks' selected entries: check the arguments, then run the named algorithm.

    Raises ValueError for an unknown algorithm, k outside 1..length, more than k entries, or a
    `selected` that is no SparseVector; MessageError when a peer's message is malformed, and
    PeerError when a peer is gone.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    check(selected)
    if not 1 <= k <= selected.length:
        raise ValueError(f"k must lie in 1..{selected.length} (the vector's length), got {k}")
    if selected.entries > k:
        raise ValueError(f"at most k = {k} entries may be selected, got {selected.entries}")
    return ALGORITHMS[algorithm](selected, k, transport)
