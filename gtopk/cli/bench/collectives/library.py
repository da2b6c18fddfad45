"""The dense allreduce that comes with MPI or gloo, called directly, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as distributed

from collectives.cost import dense_bytes
from collectives.transports import Traffic, Transport
from collectives.vector import Array


class ModelledLibrary:
    """A library's allreduce, which counts as the fewest bytes that it can send.

    group: the ranks, as the library knows them: a communicator of MPI, a group of gloo, or a
        transport.
    """

    def __init__(
        self, name: str, group: Any, sum_in_place: Callable[[Array], object], size: int
    ) -> None:
        self.name, self.group, self.size = name, group, size
        self.traffic = Traffic()
        self.rounds = (size - 1).bit_length()
        self._sum_in_place = sum_in_place

    def allreduce(self, array: Array) -> None:
        """Sum float32 [n] over the ranks in place."""
        self._sum_in_place(array)
        self.traffic.count(dense_bytes(array.size, self.size, array.itemsize), 2 * self.rounds)


def _of_mpi(ranks: Sequence[int]) -> ModelledLibrary:
    from mpi4py import MPI

    ours = MPI.COMM_WORLD.Create(MPI.COMM_WORLD.group.Incl(ranks))
    return ModelledLibrary(
        MPI.Get_library_version().split(",")[0].strip(),
        ours,
        lambda array: ours.Allreduce(MPI.IN_PLACE, array, MPI.SUM),
        len(ranks),
    )


def _of_gloo(transport: Any, ranks: Sequence[int]) -> ModelledLibrary:
    # Ranks that have met elsewhere meet again, under names of their own in the same store.
    if not distributed.is_initialized():
        store = distributed.distributed_c10d.PrefixStore("gtopk.cli.bench", transport.store)
        distributed.init_process_group(
            "gloo", store=store, rank=transport.rank, world_size=transport.size
        )
    group: Any = distributed.new_group(list(ranks), backend="gloo")
    return ModelledLibrary(
        f"gloo of torch {torch.__version__}",
        group,
        lambda array: distributed.all_reduce(torch.from_numpy(array), group=group),
        len(ranks),
    )


def open_library(transport: Transport, ranks: Sequence[int]) -> ModelledLibrary:
    """Return the library below a transport for some of its ranks, in order; all must call it.

    On a rank that is not among them, what is returned must not be used.
    """
    # An emulated link paces the transport's messages alone: the library's own would be too fast.
    if transport.name == "mpi" and transport.link is None:
        return _of_mpi(ranks)
    if transport.name == "torch.distributed" and transport.link is None:
        return _of_gloo(transport, ranks)
    # No library is below, as between threads.
    some = transport.subset(ranks) if transport.rank in ranks else transport
    return ModelledLibrary(some.library(), some, some.allreduce, len(ranks))
