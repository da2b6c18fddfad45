"""Run under torchrun on 2 ranks, with a folder: an Accelerate loop whose DDP uses gTop-k."""

import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config  # before any optimizer: models are compiled here
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd
from gtopk.accelerate import compress

warnings.simplefilter("ignore")
FOLDER = sys.argv[1]
accelerator = Accelerator(cpu=True)


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.double().parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def prepared(kind: Any = torch.optim.SGD, samples: int = 64) -> tuple[Any, Any, Any]:
    model = network()
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = kind(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x), 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return model, optimizer, loader


def train(model: Any, optimizer: Any, loader: Any, bad: bool = False) -> None:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for (x,) in loader:
        for each in optimizers:
            each.zero_grad()
        loss = model(x).square().mean() * (float("nan") if bad and accelerator.process_index else 1)
        accelerator.backward(loss)
        for each in optimizers:
            each.step()


def residuals(state: Any, model: Any) -> torch.Tensor:
    """Return the sum over the ranks of the residual."""
    (held,) = state.state_dict(model)["held"].values()
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    mine = torch.cat([held[name]["residual"].reshape(-1) for name in names])
    return hvd.allreduce(mine, op=hvd.Sum)


# All entries: what DDP does alone.
dense, ours = prepared(), prepared()
compress(accelerator, ours[0], ours[1], density=1.0)
for each in (dense, ours):
    train(*each)
torch.testing.assert_close(weights(ours[0]), weights(dense[0]), rtol=1e-12, atol=1e-12)
accelerator.free_memory()

# Some entries; saved and resumed.
model, optimizer, loader = prepared()
state = compress(accelerator, model, optimizer, density=0.1)
train(model, optimizer, loader)
mine = weights(model)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))
total = residuals(state, model)
accelerator.save_state(FOLDER)
train(model, optimizer, loader)
accelerator.load_state(FOLDER)
assert torch.equal(weights(model), mine)
torch.testing.assert_close(residuals(state, model), total, rtol=1e-12, atol=1e-12)

# A gradient that is not finite on one rank costs a step on all.
train(model, optimizer, loader, bad=True)
assert torch.equal(weights(model), mine)
assert state.skipped_steps == len(loader)

# AdamW's steps are made before the selection; saved and resumed.
accelerator.free_memory()
accelerator._custom_objects.clear()  # the objects registered for the earlier states
model, optimizer, loader = prepared(torch.optim.AdamW)
state = compress(accelerator, model, optimizer, density=0.1, global_clip_norm=1.0)
assert state.makes_adam_steps
train(model, optimizer, loader)
accelerator.save_state(f"{FOLDER}/adamw")
mine = weights(model)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))
train(model, optimizer, loader)
ended = weights(model)
accelerator.load_state(f"{FOLDER}/adamw")
assert torch.equal(weights(model), mine)
train(model, optimizer, loader)
torch.testing.assert_close(weights(model), ended, rtol=1e-6, atol=1e-6)
before = weights(model)
train(model, optimizer, loader, bad=True)
assert torch.equal(weights(model), before)
optimizer.zero_grad()
accelerator.backward(model(torch.ones(2, 6, dtype=torch.float64)).square().mean())
accelerator.clip_grad_norm_(model.parameters(), 0.1)
with pytest.raises(ValueError, match="global_clip_norm="):
    optimizer.step()

# A loop that clips learns as much as with whole gradients.
found = [float(network()(torch.ones(1, 6).double()).square().mean())]
for hooks in (False, True):
    model, optimizer, loader = prepared(partial(torch.optim.AdamW, weight_decay=0.0))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    if hooks:
        compress(accelerator, model, optimizer, density=0.25, global_clip_norm=0.05)
    for _ in range(12):
        for (x,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            if not hooks:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    model.eval()
    found.append(float(model(torch.ones(1, 6).double()).square().mean()))
    accelerator.free_memory()
begun, dense_loss, our_loss = found
assert dense_loss < 0.5 * begun, found
assert our_loss - dense_loss < 0.1 * (begun - dense_loss), found

# Nor does it move the parameters of another optimizer of the same model.
model, _, loader = prepared()
bare = accelerator.unwrap_model(model)
both = [
    accelerator.prepare(torch.optim.SGD(bare[0].parameters(), lr=0.1)),
    accelerator.prepare(torch.optim.SGD(bare[2].parameters(), lr=0.1)),
]
state = compress(accelerator, model, both, density=0.1)
train(model, both, loader)
mine = weights(model)
train(model, both, loader, bad=True)
assert torch.equal(weights(model), mine)

with pytest.raises(ValueError, match="needs a model that"):
    compress(accelerator, network(), optimizer)

# Gradients accumulate over four batches (fewer at the loader's end), and one exchange ends each
# round: with all entries, weights equal those of DDP with AdamW's steps after the exchange.
accelerator.gradient_accumulation_steps = 4
for kind in (torch.optim.SGD, torch.optim.AdamW):
    dense, ours = prepared(kind, samples=96), prepared(kind, samples=96)  # 6 batches a rank
    state = compress(accelerator, ours[0], ours[1], density=1.0, adam_steps="after")
    for model, optimizer, loader in (dense, ours):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(weights(ours[0]), weights(dense[0]), rtol=1e-9, atol=1e-9)
    assert state.progress.steps == 2
    accelerator.free_memory()

# The same holds if the hook makes AdamW's steps, from the sum of each round.
model, optimizer, loader = prepared(torch.optim.AdamW, samples=96)
state = compress(accelerator, model, optimizer, density=0.1)
assert state.makes_adam_steps
for (x,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
assert state.progress.steps == 2
mine = weights(model)
assert all(torch.equal(mine, other) for other in hvd.allgather(mine[None]))
accelerator.gradient_accumulation_steps = 1

# The script's own optimizer is accepted, too; a scheduler is no optimizer.
model, optimizer, loader = prepared(torch.optim.AdamW)
with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer"):
    compress(accelerator, model, torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
state = compress(accelerator, model, optimizer.optimizer, density=0.1, scaler=accelerator.scaler)
assert state.makes_adam_steps
print("Accelerate uses gTop-k\n", end="", flush=True)
torch.distributed.destroy_process_group()
