"""Measure images per second on synthetic data, the way Horovod's users do."""

from __future__ import annotations

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import rank, size
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=1)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
)
lr_scaler = hvd.size() if not args.use_adasum else 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=Compression.fp16 if args.fp16_allreduce else Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(args.batch_size, 3, 32, 32)
target = torch.randint(10, (args.batch_size,))


def benchmark_step() -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


def log(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


log(f"Batch size: {args.batch_size}")
log(f"Number of CPUs: {size()}")
timeit.timeit(benchmark_step, number=args.num_warmup_batches)
rates = []
for iteration in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
    log(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per CPU")
mean, conf = np.mean(rates), 1.96 * np.std(rates)
log(f"Img/sec per CPU: {mean:.1f} +-{conf:.1f}")
log(f"Total img/sec on {size()} CPU(s): {size() * mean:.1f} +-{size() * conf:.1f}")
