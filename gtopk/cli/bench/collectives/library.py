"""Library: the dense collectives that come with MPI or gloo, called directly.

The baselines use them: so their times are those of the library on this network, without gtopk's
transports.

Gloo's own collectives, through torch.distributed's default process group.

MPI's own collectives, through mpi4py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as distributed

from collectives.cost import dense_bytes
from collectives.transports import Traffic, Transport
from collectives.vector import Array


class MpiLibrary:
    """MPI's blocking calls on some of MPI.COMM_WORLD's ranks; all of those must make it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.name = MPI.Get_library_version().split(",")[0].strip()
        world = MPI.COMM_WORLD
        self._communicator = world.Create(world.group.Incl(ranks))

    def allreduce(self, array: Array) -> None:
        self._communicator.Allreduce(self._mpi.IN_PLACE, array, self._mpi.SUM)

    def allgather(self, message: Array) -> Array:
        gathered = np.empty(self._communicator.size * message.size, np.uint8)
        self._communicator.Allgather(message, gathered)
        return gathered

    def send(self, message: Array, to: int) -> None:
        self._communicator.Send(message, to)

    def receive(self, message: Array, source: int) -> None:
        self._communicator.Recv(message, source)

    def broadcast(self, message: Array, root: int) -> None:
        self._communicator.Bcast(message, root)

    def barrier(self) -> None:
        self._communicator.Barrier()


class GlooLibrary:
    """Gloo's blocking calls on some of the default group's ranks; all of its ranks must make it."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        """transport: torch.distributed's, of all ranks; where they have met they meet again."""
        if not distributed.is_initialized():
            met: Any = transport
            store = distributed.distributed_c10d.PrefixStore("gtopk.cli.bench", met.store)
            distributed.init_process_group(
                "gloo", store=store, rank=transport.rank, world_size=transport.size
            )
        self.name = f"gloo of torch {torch.__version__}"
        self._ranks = ranks
        self._group: Any = distributed.new_group(list(ranks), backend="gloo")

    def allreduce(self, array: Array) -> None:
        distributed.all_reduce(torch.from_numpy(array), group=self._group)

    def allgather(self, message: Array) -> Array:
        gathered = torch.empty(len(self._ranks) * message.size, dtype=torch.uint8)
        rows = list(gathered.view(len(self._ranks), -1))
        distributed.all_gather(rows, torch.from_numpy(message), group=self._group)
        array: Array = gathered.numpy()
        return array

    def send(self, message: Array, to: int) -> None:
        distributed.send(torch.from_numpy(message), self._ranks[to], group=self._group)

    def receive(self, message: Array, source: int) -> None:
        distributed.recv(torch.from_numpy(message), self._ranks[source], group=self._group)

    def broadcast(self, message: Array, root: int) -> None:
        distributed.broadcast(torch.from_numpy(message), self._ranks[root], group=self._group)

    def barrier(self) -> None:
        distributed.barrier(group=self._group)


class Library(Protocol):
    """The operations that the baselines need, on arrays in the host's memory."""

    name: str

    def allreduce(self, array: Array) -> None:
        """Sum float32 [n] over the ranks in place."""

    def allgather(self, message: Array) -> Array:
        """Return the messages of all ranks, uint8 [m] each, in rank order: uint8 [P m]."""

    def send(self, message: Array, to: int) -> None: ...

    def receive(self, message: Array, source: int) -> None:
        """Fill uint8 [m] with a message of a rank."""

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


class ModelledLibrary:
    """A library, with the least bytes that its operations send.

    Only messages given to `send` can be counted; the others are reckoned: an allreduce at the
    fewest possible bytes, an allgather and a broadcast at one copy for each rank that lacks it.
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


def open_library(transport: Transport, ranks: Sequence[int]) -> ModelledLibrary:
    """Return the library below a transport for some of its ranks, in order; all must call it.

    On a rank that is not among them, what is returned must not be used.
    """
    library: Library
    if transport.link is not None:  # which paces no library's own messages
        library = OfTransport(transport.subset(ranks) if transport.rank in ranks else transport)
    elif transport.name == "mpi":
        library = MpiLibrary(ranks)
    elif transport.name == "torch.distributed":
        library = GlooLibrary(transport, ranks)
    else:
        library = OfTransport(transport.subset(ranks) if transport.rank in ranks else transport)
    place = ranks.index(transport.rank) if transport.rank in ranks else 0
    return ModelledLibrary(library, place, len(ranks))
