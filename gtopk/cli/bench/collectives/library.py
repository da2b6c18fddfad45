"""The dense allreduce of MPI or gloo, called directly, with a formula for the bytes it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as distributed

from collectives.cost import dense_bytes
from collectives.transports import Traffic, Transport
from collectives.vector import Array


class ModelledLibrary:
    """A library's allreduce; its traffic is taken as the minimum that an allreduce must send.

    group: the library's object for the ranks: an MPI communicator, a gloo group or a transport.
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

    communicator = MPI.COMM_WORLD.Create(MPI.COMM_WORLD.group.Incl(ranks))
    return ModelledLibrary(
        MPI.Get_library_version().split(",")[0].strip(),
        communicator,
        lambda array: communicator.Allreduce(MPI.IN_PLACE, array, MPI.SUM),
        len(ranks),
    )


def _of_gloo(transport: Any, ranks: Sequence[int]) -> ModelledLibrary:
    # Reuse the transport's store with a prefix, so that keys do not clash.
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

    Do not use the result on other ranks.
    """
    # An emulated link slows only the transport's messages; the library's own would be too fast.
    if transport.name == "mpi" and transport.link is None:
        return _of_mpi(ranks)
    if transport.name == "torch.distributed" and transport.link is None:
        return _of_gloo(transport, ranks)
    # No usable library, for example between threads: use the transport's own allreduce.
    some = transport.subset(ranks) if transport.rank in ranks else transport
    return ModelledLibrary(some.library(), some, some.allreduce, len(ranks))
