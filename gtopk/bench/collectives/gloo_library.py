"""Gloo's own collectives, through torch.distributed's default process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as distributed

from collectives.transports import Transport
from collectives.vector import Array


class GlooLibrary:
    """Gloo's blocking calls on some of the default group's ranks; all of its ranks must make it."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        """transport: torch.distributed's, of all ranks; where they have met they meet again."""
        if not distributed.is_initialized():
            met: Any = transport
            store = distributed.distributed_c10d.PrefixStore("gtopk.bench", met.store)
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
