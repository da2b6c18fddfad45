"""Nodes: which ranks share a host; and the reduction of a GPU's vector by way of the host.

Every transport and format works on the host:

GPU     selected                         update, returned
           | k entries                          ^ as many as there are
host       +--> reduction among the hosts ------+
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import MessageError
from ..transports.transport import Transport
from ..vector import SparseVector


def find_nodes(transport: Transport, node_size: int | None = None) -> list[list[int]]:
    """Return the ranks of every host, which takes a small allgather.

    node_size: if given, so many consecutive ranks are a node, and nothing is exchanged.
    """
    if node_size is not None:
        everyone = list(range(transport.size))
        return [everyone[first : first + node_size] for first in everyone[::node_size]]
    # A host is named by its lowest rank, a number that all its ranks know.
    lowest = np.array([min(transport.node())], np.int64)
    nodes: dict[int, list[int]] = {}
    for rank, message in enumerate(transport.allgather(lowest.view(np.uint8))):
        if message.size != lowest.nbytes:
            raise MessageError(
                f"the message from rank {transport.ranks[rank]} is malformed: its {message.size} "
                "bytes are not the number of a node; every rank must run the same algorithm"
            )
        nodes.setdefault(int(message.view(np.int64)[0]), []).append(rank)
    return checked_nodes(nodes.values(), transport.size)


def checked_nodes(nodes: Iterable[Sequence[int]], size: int) -> list[list[int]]:
    """Return the nodes by their lowest rank; raise ValueError unless each rank is in just one."""
    ordered = sorted(sorted(node) for node in nodes if len(node))
    if sorted(rank for node in ordered for rank in node) != list(range(size)):
        raise ValueError(
            f"nodes must have each of the ranks 0..{size - 1} in exactly one list, got {ordered}"
        )
    return ordered


Reduction = Callable[[SparseVector], tuple[SparseVector, SparseVector]]


def by_host(reduction: Reduction, selected: SparseVector) -> tuple[SparseVector, SparseVector]:
    """Run the reduction on copies in the host's memory; return its result on the current GPU.

    selected: on the current GPU, whose current stream orders the copies.
    """
    update, returned = reduction(selected.on_host())
    return update.beside(selected.values), returned.beside(selected.values)
