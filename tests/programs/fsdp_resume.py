"""Run under torchrun, with a folder: replicas of two shards save; others, of as many, go on.

What the replicas of a shard hold back, summed, is what those before them held back.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gtopk
import gtopk.torch as hvd
from gtopk import fsdp

torch.distributed.init_process_group("gloo")
RANK, SIZE = torch.distributed.get_rank(), torch.distributed.get_world_size()
mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(2)))
for layer in model:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
state = fsdp.replicate(model, mesh["replicate"], density=0.05)


def totals() -> torch.Tensor:
    """Return what all replicas hold back of each shard, summed, entry by entry."""
    (held,) = state.state_dict()["held"].values()
    mine = torch.cat([held[name]["residual"].reshape(-1) for name in sorted(held)])
    return hvd.allgather(hvd.allreduce(mine, op=hvd.Sum, process_set=state.process_set)[None])[:2]


found = gtopk.load_latest(sys.argv[1], None)
if found is None:
    for step in range(3):
        torch.manual_seed(100 * step + RANK)
        model(torch.randn(8, 12)).square().mean().backward()
    gtopk.save_checkpoint(
        sys.argv[1],
        None,
        None,
        step=3,
        replicas=state.state_dict(),
        itself=state,
        totals=totals(),
    )
else:
    state.load_state_dict(found.values["replicas"])
    model(torch.zeros(8, 12)).mul(0.0).sum().backward()  # so that there are buckets
    assert state.progress.steps == 4
    state.load_state_dict(found.values["replicas"])
    assert float((found.values["totals"] != 0).double().mean()) > 0.9
    torch.testing.assert_close(totals(), found.values["totals"], rtol=1e-5, atol=1e-8)
    state.load_state_dict({**state.state_dict(), "steps": 0, "held": {RANK: {}}})
    gtopk.load_latest(sys.argv[1], None, itself=state)
    torch.testing.assert_close(totals(), found.values["totals"], rtol=1e-5, atol=1e-8)
print(f"rank {RANK} of {SIZE}: the residual is what it was\n", end="", flush=True)
hvd.shutdown()
torch.distributed.destroy_process_group()
