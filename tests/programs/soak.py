"""Train for many steps in tiny buckets, and print memory, descriptors, threads and errors.

Argument: how many steps. Each rank prints a line "soak {...}" with a JSON object: resident bytes
and open descriptors at ten points, threads at the end, counters, and a digest of the parameters.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import sys
import threading
from pathlib import Path

import light_torch  # noqa: F401

import torch

import gtopk.torch as hvd

steps = int(sys.argv[1])
hvd.init()
rank = hvd.rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(6)))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    model.named_parameters(),
    hvd.Compression.gtopk(density=0.1),
    bucket_bytes=512,
    check_every=max(1, steps // 10),
)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


resident, descriptors = [], []
counted = selected = 0
buckets = set()
generator = torch.Generator().manual_seed(rank)
for step in range(steps):
    optimizer.zero_grad()
    inputs = torch.randn(4, 12, generator=generator)
    (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
    optimizer.step()
    counted += int(hvd.allreduce(torch.tensor([step + rank]), op=hvd.Sum, name="count"))
    selected += optimizer.last_step.selected
    buckets.add(optimizer.last_step.buckets)
    if (step + 1) % (steps // 10) == 0:
        resident.append(resident_bytes())
        descriptors.append(len(os.listdir("/proc/self/fd")))
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
result = {
    "rank": rank,
    "resident": resident,
    "descriptors": descriptors,
    "threads": threading.active_count(),
    "counted": counted,
    "selected": selected,
    "buckets": sorted(buckets),
    "skipped": optimizer.skipped_steps,
    "digest": digest.hexdigest(),
}
print(f"soak {json.dumps(result)}\n", end="", flush=True)
hvd.shutdown()
