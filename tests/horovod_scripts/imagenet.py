"""Train as on ImageNet, the way Horovod's users do: large batches, warm-up, checkpoints.

The data are synthetic: 8 classes of coloured noise. Gradients are accumulated over several batches,
sent in half precision, and clipped after they were summed.
"""

from __future__ import annotations

import argparse
import math
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--stop-after", type=int, default=10**9, help="end here, as if interrupted")
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

CLASSES = 8
allreduce_batch_size = args.batch_size * args.batches_per_allreduce

hvd.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)

# Rank 0 looks for the latest checkpoint, and tells the others where to begin.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if hvd.rank() == 0 and os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(
    torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
).item()
verbose = hvd.rank() == 0


def synthetic(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 3, 8, 8, generator=generator)
    colours = torch.randn(CLASSES, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(noise + colours[labels], labels)


train_dataset, val_dataset = synthetic(480, 1), synthetic(240, 2)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
val_sampler = DistributedSampler(val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, allreduce_batch_size, sampler=train_sampler)
val_loader = DataLoader(val_dataset, args.batch_size, sampler=val_sampler)

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, CLASSES),
)
optimizer = torch.optim.SGD(
    model.parameters(),
    lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
    momentum=args.momentum,
    weight_decay=args.wd,
)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)

# Only rank 0 reads the file; what it says is broadcast.
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    """The mean over batches, of the mean over ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self) -> float:
        return (self.sum / self.n).item()


def adjust_learning_rate(epoch: int, batch_idx: int) -> None:
    """From the rate of one rank to that of all in the first epochs (Goyal et al. 2017)."""
    if epoch < args.warmup_epochs:
        progress = epoch + float(batch_idx + 1) / len(train_loader)
        adjustment = 1.0 / hvd.size() * (progress * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        adjustment = 1.0 if epoch < 30 else 1e-1
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * adjustment


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1).eq(target).float().mean()


def train(epoch: int) -> None:
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        parts = math.ceil(len(data) / args.batch_size)
        for begin in range(0, len(data), args.batch_size):
            data_batch = data[begin : begin + args.batch_size]
            target_batch = target[begin : begin + args.batch_size]
            output = model(data_batch)
            train_accuracy.update(accuracy(output, target_batch))
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            (loss / parts).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    if verbose:
        rate = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch + 1}: lr {rate:.5f} train loss {train_loss.avg:.6f}")


def validate(epoch: int) -> None:
    model.eval()
    val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            output = model(data)
            val_loss.update(F.cross_entropy(output, target))
            val_accuracy.update(accuracy(output, target))
    if verbose:
        print(
            f"epoch {epoch + 1}: validation loss {val_loss.avg:.6f} "
            f"accuracy {100 * val_accuracy.avg:.1f}%",
            flush=True,
        )


def save_checkpoint(epoch: int) -> None:
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


if verbose:
    print(f"begins with epoch {resume_from_epoch + 1}")
for epoch in range(resume_from_epoch, min(args.epochs, args.stop_after)):
    train(epoch)
    validate(epoch)
    save_checkpoint(epoch)
