"""Sparse collectives: arrays in, arrays out.

from collectives import open_transport, reduce, select

transport = open_transport("mpi")
picked, threshold = select(accumulated, k)
update, returned = reduce(picked, k, transport)          # algorithm="gtopk"
"""

from .algorithms import ALGORITHMS, reduce
from .errors import (
    CollectiveError,
    MessageError,
    MismatchError,
    NonFiniteError,
    PeerError,
    PeerTimeoutError,
)
from .kernels import accumulate_and_select, merge, select
from .selectors import SELECTORS
from .transports import Transport, local_world, open_transport, run_ranks
from .vector import SparseVector

__all__ = [
    "ALGORITHMS",
    "SELECTORS",
    "CollectiveError",
    "MessageError",
    "MismatchError",
    "NonFiniteError",
    "PeerError",
    "PeerTimeoutError",
    "SparseVector",
    "Transport",
    "accumulate_and_select",
    "local_world",
    "merge",
    "open_transport",
    "reduce",
    "run_ranks",
    "select",
]
