"""The dense collectives that come with MPI or gloo, called directly, and what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed

from collectives.cost import dense_bytes
from collectives.transports import Traffic, Transport
from collectives.vector import Array


class Calls(NamedTuple):
    """The blocking collectives of a library, on arrays in the host's memory."""

    name: str
    allreduce: Callable[[Array], object]  # sums float32 [n] over the ranks in place
    allgather: Callable[[Array], Array]  # uint8 [m] of each rank, in rank order: uint8 [P m]
    send: Callable[[Array, int], object]
    receive: Callable[[Array, int], object]  # fills uint8 [m] with a message of a rank
    broadcast: Callable[[Array, int], object]  # fills uint8 [m] with the root's
    barrier: Callable[[], object]


def _of_mpi(ranks: Sequence[int]) -> Calls:
    """Return MPI's calls on some of MPI.COMM_WORLD's ranks; all of those must ask for them."""
    from mpi4py import MPI

    ours = MPI.COMM_WORLD.Create(MPI.COMM_WORLD.group.Incl(ranks))

    def allgather(message: Array) -> Array:
        gathered = np.empty(ours.size * message.size, np.uint8)
        ours.Allgather(message, gathered)
        return gathered

    return Calls(
        MPI.Get_library_version().split(",")[0].strip(),
        lambda array: ours.Allreduce(MPI.IN_PLACE, array, MPI.SUM),
        allgather,
        ours.Send,
        ours.Recv,
        ours.Bcast,
        ours.Barrier,
    )


def _of_gloo(transport: Any, ranks: Sequence[int]) -> Calls:
    """Return gloo's calls on some of the ranks of torch.distributed's transport, which all ask."""
    # Ranks that have met elsewhere meet again, under names of their own in the same store.
    if not distributed.is_initialized():
        store = distributed.distributed_c10d.PrefixStore("gtopk.cli.bench", transport.store)
        distributed.init_process_group(
            "gloo", store=store, rank=transport.rank, world_size=transport.size
        )
    group: Any = distributed.new_group(list(ranks), backend="gloo")

    def allgather(message: Array) -> Array:
        gathered = torch.empty(len(ranks) * message.size, dtype=torch.uint8)
        rows = list(gathered.view(len(ranks), -1))
        distributed.all_gather(rows, torch.from_numpy(message), group=group)
        array: Array = gathered.numpy()
        return array

    return Calls(
        f"gloo of torch {torch.__version__}",
        lambda array: distributed.all_reduce(torch.from_numpy(array), group=group),
        allgather,
        lambda message, to: distributed.send(torch.from_numpy(message), ranks[to], group=group),
        lambda message, source: distributed.recv(
            torch.from_numpy(message), ranks[source], group=group
        ),
        lambda message, root: distributed.broadcast(
            torch.from_numpy(message), ranks[root], group=group
        ),
        lambda: distributed.barrier(group=group),
    )


def _of_transport(transport: Transport) -> Calls:
    """Return the transport's own calls, where no library is below, as between threads."""
    return Calls(
        transport.library(),
        transport.allreduce,
        lambda message: np.concatenate(transport.allgather(message)),
        lambda message, to: transport.send(message, to)(),
        lambda message, source: np.copyto(message, transport.receive(source)),
        lambda message, root: np.copyto(message, transport.broadcast(message, root)),
        transport.barrier,
    )


class ModelledLibrary:
    """A library, with the least bytes that its operations send.

    Only messages given to `send` can be counted; the others are reckoned: an allreduce at the
    fewest possible bytes, an allgather and a broadcast at one copy for each rank that lacks it.
    """

    def __init__(self, calls: Calls, rank: int, size: int) -> None:
        self.name, self.receive = calls.name, calls.receive
        self.traffic = Traffic()
        self._calls, self._rank, self._size = calls, rank, size
        self._rounds = (size - 1).bit_length()

    def allreduce(self, array: Array) -> None:
        self._calls.allreduce(array)
        self.traffic.count(dense_bytes(array.size, self._size, array.itemsize), 2 * self._rounds)

    def allgather(self, message: Array) -> Array:
        gathered = self._calls.allgather(message)
        self.traffic.count((self._size - 1) * message.size, self._rounds)
        return gathered

    def send(self, message: Array, to: int) -> None:
        self._calls.send(message, to)
        self.traffic.count(message.size)

    def broadcast(self, message: Array, root: int) -> None:
        self._calls.broadcast(message, root)
        # As if passed on from one rank to the next: the last one sends nothing.
        if (self._rank + 1) % self._size != root:
            self.traffic.count(message.size)

    def barrier(self) -> None:
        self._calls.barrier()
        self.traffic.count(0, self._rounds)


def open_library(transport: Transport, ranks: Sequence[int]) -> ModelledLibrary:
    """Return the library below a transport for some of its ranks, in order; all must call it.

    On a rank that is not among them, what is returned must not be used.
    """
    takes_part = transport.rank in ranks
    # An emulated link paces the transport's messages alone: the library's own would be too fast.
    if transport.name == "mpi" and transport.link is None:
        calls = _of_mpi(ranks)
    elif transport.name == "torch.distributed" and transport.link is None:
        calls = _of_gloo(transport, ranks)
    else:
        calls = _of_transport(transport.subset(ranks) if takes_part else transport)
    return ModelledLibrary(calls, ranks.index(transport.rank) if takes_part else 0, len(ranks))
