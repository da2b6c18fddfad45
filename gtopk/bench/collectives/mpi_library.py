"""MPI's own collectives, through mpi4py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
