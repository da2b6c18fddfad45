"""Train with Adasum, the way Horovod's users do: the learning rate need not grow with the ranks."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from horovod import torch as hvd
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

hvd.init()
torch.manual_seed(11)
torch.set_num_threads(1)

# With NCCL, Adasum sums inside a node before it combines nodes.
lr_scaler = hvd.local_size() if torch.cuda.is_available() and hvd.nccl_built() else 1

truth = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))
generator = torch.Generator().manual_seed(100 + hvd.rank())  # each rank has its own data
model = nn.Linear(6, 3, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum
)
for step in range(args.steps):
    x = torch.randn(16, 6, generator=generator)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x @ truth)
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        mean_loss = hvd.allreduce(loss.detach(), op=hvd.Average, name="loss").item()
        if hvd.rank() == 0:
            print(f"step {step + 1}: loss {mean_loss:.6f}", flush=True)

# Vectors that point the same way are averaged, orthogonal ones added.
parallel = hvd.allreduce(torch.tensor([3.0, 4.0]), op=hvd.Adasum, name="parallel")
orthogonal = torch.zeros(hvd.size())
orthogonal[hvd.rank()] = 1.0
added = hvd.allreduce(orthogonal, op=hvd.Adasum, name="orthogonal")
replicas = hvd.allgather(model.weight.detach().reshape(1, -1), name="replicas")
if hvd.rank() == 0:
    print(f"parallel {parallel.tolist()} orthogonal {added.tolist()}")
    print(f"replicas differ by {(replicas - replicas[0]).abs().max().item()}", flush=True)
