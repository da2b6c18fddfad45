"""Gloo: the process group that contenders of torch's need, whatever launched the ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch.distributed
from torch._C._distributed_c10d import TCPStore

from collectives.transports import Transport

from ...runtime.liveness.address import own_address
from ...runtime.world import world
from .collectives.run import count_hosts

_START: Final = timedelta(seconds=120)


def own_host(transport: Transport) -> str:
    """Return rank 0's address, where the ranks are to meet; all call it."""
    own = own_address(one_host=count_hosts(transport) == 1)
    address: str = transport.broadcast_object(own)
    return address


def open_gloo(master: str) -> Any:
    """Return gloo's group of all ranks; master: rank 0's address."""
    if torch.distributed.is_initialized():  # by the library's own, where gloo carries the world
        return torch.distributed.group.WORLD
    here = world.current()
    store = None
    if here.rank == 0:
        store = TCPStore(master, 0, here.size, True, _START, wait_for_workers=False)

    def tell(transport: Transport, all_flags: list[int]) -> int:
        return max(all_flags)

    port = here.engine.submit(
        "bench.port", [], tell, flags=store.port if store is not None else 0
    ).wait()
    if store is None:
        store = TCPStore(master, port, here.size, False, _START)
    torch.distributed.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    return torch.distributed.group.WORLD
