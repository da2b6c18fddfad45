"""Run under torchrun on 2 ranks, with a folder: Lightning Fabric, whose DDP uses gTop-k."""

import logging
import sys
import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk.lightning import compress

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
FILE = f"{sys.argv[1]}/last.ckpt"
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()


def prepared(kind: Any = torch.optim.SGD) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    model, optimizer = fabric.setup(model, kind(model.parameters(), lr=0.1))
    return model, optimizer, fabric.setup_dataloaders(DataLoader(TensorDataset(x), 8))


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(model: Any, optimizer: Any, loader: Any, passes: int = 1) -> None:
    for number, (x,) in enumerate(loader, 1):
        is_last = number % passes == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(model(x).square().mean())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def residuals(state: Any, model: Any) -> torch.Tensor:
    """Return the sum over the ranks of the residual."""
    (held,) = state.state_dict(model)["held"].values()
    names = [name for name, _ in model.module.named_parameters()]
    assert sorted(held) == sorted(names)  # the model's own, without Fabric's and DDP's
    mine = torch.cat([held[name]["residual"].reshape(-1) for name in names])
    return hvd.allreduce(mine, op=hvd.Sum)


# All entries: the same as DDP alone, also when gradients of two batches accumulate.
for passes in (1, 2):
    dense, ours = prepared(), prepared()
    state = compress(fabric, ours[0], ours[1], density=1.0)
    for each in (dense, ours):
        train(*each, passes=passes)
    torch.testing.assert_close(weights(ours[0]), weights(dense[0]), rtol=1e-5, atol=1e-6)
    assert state.progress.steps == len(ours[2]) // passes

# AdamW's steps before the selection; saved in Fabric's own checkpoint and resumed.
model, optimizer, loader = prepared(torch.optim.AdamW)
state = compress(fabric, model, optimizer, density=0.1, global_clip_norm=1.0)
assert state.makes_adam_steps
train(model, optimizer, loader)
mine, total = weights(model), residuals(state, model)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))
assert bool(total.any())
fabric.save(FILE, {"model": model, "optimizer": optimizer, "gtopk": state.stateful(model)})
model, optimizer, loader = prepared(torch.optim.AdamW)
state = compress(fabric, model, optimizer, density=0.1, global_clip_norm=1.0)
fabric.load(FILE, {"model": model, "optimizer": optimizer, "gtopk": state.stateful(model)})
assert torch.equal(weights(model), mine)
torch.testing.assert_close(residuals(state, model), total, rtol=1e-6, atol=1e-7)
train(model, optimizer, loader)
assert all(torch.equal(weights(model), other) for other in hvd.allgather(weights(model)[None]))

# Fabric would clip agreed steps: this is an error that names the way out.
fabric.backward(model(torch.ones(2, 6)).square().mean())
fabric.clip_gradients(model, optimizer, max_norm=0.01)
with pytest.raises(ValueError, match="global_clip_norm="):
    optimizer.step()

with pytest.raises(ValueError, match=r"use Fabric\(strategy='ddp'\).*got Linear on 2 processes"):
    compress(fabric, torch.nn.Linear(2, 2), optimizer)
with pytest.raises(TypeError, match=r"compress\(fabric, model, optimizer\) got .* first"):
    compress(model, fabric, optimizer)
print("Fabric uses gTop-k\n", end="", flush=True)
torch.distributed.destroy_process_group()
