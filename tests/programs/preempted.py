"""A training job that saves and ends when one of its ranks gets SIGTERM; for jobs.Job.

Arguments: the folder of its checkpoints, and how many seconds it needs to save.
"""

import os
import sys
import time

import light_torch  # noqa: F401

import torch

import gtopk
import gtopk.torch as hvd

folder, seconds = sys.argv[1], float(sys.argv[2])
hvd.init()
RANK = hvd.rank()
print(f"rank {RANK} is {os.getpid()}\n", end="", flush=True)
model = torch.nn.Linear(20, 3)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    model.named_parameters(),
    hvd.Compression.gtopk(density=0.2),
    bucket_bytes=64,
)
found = gtopk.load_latest(folder, model, optimizer)
step = found.step if found else 0
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
with gtopk.termination() as preempted:
    print(f"rank {RANK} goes on from {step}\n", end="", flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        step += 1
        time.sleep(0.01)
        if preempted:
            print(f"rank {RANK} saves at {step} for {preempted.ranks}\n", end="", flush=True)
            time.sleep(seconds)
            gtopk.save_checkpoint(folder, model, optimizer, step=step)
            break
print(f"rank {RANK} goes on after its end\n", end="", flush=True)
