"""Train elastically, the way Horovod's users do: commit, and go on from there after a failure.

The failure is made up: at one batch every rank raises what a lost peer would have caused, once.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.common.exceptions import HorovodInternalError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--batches-per-commit", type=int, default=2)
parser.add_argument("--fail-at", type=int, nargs=2, default=(1, 3), metavar=("EPOCH", "BATCH"))
args = parser.parse_args()

hvd.init()
torch.manual_seed(7)
torch.set_num_threads(1)

generator = torch.Generator().manual_seed(1)
features = torch.randn(384, 10, generator=generator)
labels = (features[:, :5].sum(1) > features[:, 5:].sum(1)).long()
dataset = TensorDataset(features, labels)
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True, seed=3)
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
failures: list[tuple[int, int]] = []


def maybe_fail(epoch: int, batch: int) -> None:
    if not failures and (epoch, batch) == tuple(args.fail_at):
        failures.append((epoch, batch))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))  # what an interrupted step may leave behind
        raise HorovodInternalError("a peer was lost (made up)")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.epoch < args.epochs:
        for data, target in loader:
            maybe_fail(state.epoch, state.batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, args.batch_size)
            state.batch += 1
            if state.batch % args.batches_per_commit == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: {state.batch} batches, loss {loss.item():.6f}", flush=True)
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def on_state_reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

with torch.no_grad():
    right = model(features).argmax(1).eq(labels).float().mean()
accuracy = hvd.allreduce(right, name="accuracy").item()
if hvd.rank() == 0:
    print(f"accuracy {100 * accuracy:.1f}% after {len(failures)} failure", flush=True)
