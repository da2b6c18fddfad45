"""Run under torchrun on 2 ranks, with the folder of 4: fewer replicas of two shards resume.

The summed residuals of a shard's replicas must be those of the replicas before.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gtopk
import gtopk.torch as hvd
from gtopk import fsdp


def replicated() -> tuple[torch.nn.Module, fsdp.ReplicaState]:
    replicas = torch.distributed.get_world_size() // 2
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, fsdp.replicate(model, mesh["replicate"], density=0.05)


def totals(state: fsdp.ReplicaState) -> torch.Tensor:
    """Return the sum over the replicas of each shard's residual, entry by entry."""
    (held,) = state.state_dict()["held"].values()
    mine = torch.cat([held[name]["residual"].reshape(-1) for name in sorted(held)])
    return hvd.allgather(hvd.allreduce(mine, op=hvd.Sum, process_set=state.process_set)[None])[:2]


def save(folder: str) -> None:
    """Train for some steps, and save."""
    model, state = replicated()
    for step in range(3):
        torch.manual_seed(100 * step + torch.distributed.get_rank())
        model(torch.randn(8, 12)).square().mean().backward()
    values = {"replicas": state.state_dict(), "itself": state, "totals": totals(state)}
    gtopk.save_checkpoint(folder, None, None, step=3, **values)


def go_on(folder: str) -> None:
    """Load, and compare."""
    model, state = replicated()
    found = gtopk.load_latest(folder, None)
    assert found is not None
    state.load_state_dict(found.values["replicas"])
    model(torch.zeros(8, 12)).mul(0.0).sum().backward()  # so that buckets exist
    assert state.progress.steps == 4
    state.load_state_dict(found.values["replicas"])
    assert float((found.values["totals"] != 0).double().mean()) > 0.9
    torch.testing.assert_close(totals(state), found.values["totals"], rtol=1e-5, atol=1e-8)
    rank = torch.distributed.get_rank()
    state.load_state_dict({**state.state_dict(), "steps": 0, "held": {rank: {}}})
    gtopk.load_latest(folder, None, itself=state)
    torch.testing.assert_close(totals(state), found.values["totals"], rtol=1e-5, atol=1e-8)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    go_on(sys.argv[1])
    rank = torch.distributed.get_rank()
    print(f"rank {rank}: the residual is what it was\n", end="", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()
