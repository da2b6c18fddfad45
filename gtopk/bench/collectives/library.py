"""Library: the dense collectives that come with MPI or gloo, called directly.

The baselines are made of them: what they cost is what the library makes of the network, and not
what our transports do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from collectives.cost import dense_bytes
from collectives.transports import Traffic, Transport
from collectives.vector import Array


class Library(Protocol):
    """What the baselines need, on arrays in the host's memory."""

    name: str

    def allreduce(self, array: Array) -> None:
        """Sum float32 [n] over the ranks in place."""

    def allgather(self, message: Array) -> Array:
        """Return the messages of all ranks, uint8 [m] each, in rank order: uint8 [P m]."""

    def send(self, message: Array, to: int) -> None: ...

    def receive(self, message: Array, source: int) -> None:
        """Fill uint8 [m] with what a rank sent."""

    def broadcast(self, message: Array, root: int) -> None:
        """Fill uint8 [m] with the root's."""

    def barrier(self) -> None: ...


class OfTransport:
    """The transport's own collectives, where no library is below: ranks that are threads."""

    def __init__(self, transport: Transport) -> None:
        self.name = transport.library()
        self._transport = transport

    def allreduce(self, array: Array) -> None:
        self._transport.allreduce(array)

    def allgather(self, message: Array) -> Array:
        return np.concatenate(self._transport.allgather(message))

    def send(self, message: Array, to: int) -> None:
        self._transport.send(message, to)()

    def receive(self, message: Array, source: int) -> None:
        message[:] = self._transport.receive(source)

    def broadcast(self, message: Array, root: int) -> None:
        message[:] = self._transport.broadcast(message, root)

    def barrier(self) -> None:
        self._transport.barrier()


class Reckoning:
    """A library, and what its operations send at the least.

    Only messages given to `send` can be counted; the rest is reckoned: an allreduce at the fewest
    bytes there can be, an allgather and a broadcast at one copy for each rank that lacks it.
    """

    def __init__(self, library: Library, rank: int, size: int) -> None:
        self.name = library.name
        self.traffic = Traffic()
        self._library = library
        self._rank = rank
        self._size = size
        self._rounds = (size - 1).bit_length()

    def allreduce(self, array: Array) -> None:
        self._library.allreduce(array)
        self.traffic.count(dense_bytes(array.size, self._size, array.itemsize), 2 * self._rounds)

    def allgather(self, message: Array) -> Array:
        gathered = self._library.allgather(message)
        self.traffic.count((self._size - 1) * message.size, self._rounds)
        return gathered

    def send(self, message: Array, to: int) -> None:
        self._library.send(message, to)
        self.traffic.count(message.size)

    def receive(self, message: Array, source: int) -> None:
        self._library.receive(message, source)

    def broadcast(self, message: Array, root: int) -> None:
        self._library.broadcast(message, root)
        if (self._rank + 1) % self._size != root:  # as if passed on from one to the next
            self.traffic.count(message.size)

    def barrier(self) -> None:
        self._library.barrier()
        self.traffic.count(0, self._rounds)


def open_library(transport: Transport, ranks: Sequence[int]) -> Reckoning:
    """Return the library below a transport for some of its ranks, in order; all must call it.

    On a rank that is not among them, what is returned must not be used.
    """
    library: Library
    if transport.link is not None:  # which paces no library's own messages
        library = OfTransport(transport.subset(ranks) if transport.rank in ranks else transport)
    elif transport.name == "mpi":
        from .mpi_library import MpiLibrary

        library = MpiLibrary(ranks)
    elif transport.name == "torch.distributed":
        from .gloo_library import GlooLibrary

        library = GlooLibrary(transport, ranks)
    else:
        library = OfTransport(transport.subset(ranks) if transport.rank in ranks else transport)
    place = ranks.index(transport.rank) if transport.rank in ranks else 0
    return Reckoning(library, place, len(ranks))
