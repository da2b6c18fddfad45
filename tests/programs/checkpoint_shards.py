"""Save a DTensor by torch.distributed.checkpoint, and load it whole, and in other shards."""

from __future__ import annotations

import sys

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros

from gtopk.torch.checkpoint.dcp import Reader, Writer

folder = sys.argv[1]
distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
whole = torch.arange(35.0).reshape(7, 5)
dcp.save(
    {"model": {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "bias": torch.ones(2)}},
    storage_writer=Writer(folder, 3),
)
state = {"model": {"weight": torch.zeros(7, 5), "bias": torch.zeros(2)}}
dcp.load(state, storage_reader=Reader(folder))
assert torch.equal(state["model"]["weight"], whole)
assert torch.equal(state["model"]["bias"], torch.ones(2))
other = {"model": {"weight": zeros(7, 5, device_mesh=mesh, placements=[Shard(1)])}}
dcp.load(other, storage_reader=Reader(folder))
mine = distribute_tensor(whole, mesh, [Shard(1)]).to_local()
assert torch.equal(other["model"]["weight"].to_local(), mine)
print(f"rank {distributed.get_rank()}: shards are as they were\n", end="", flush=True)
distributed.destroy_process_group()
