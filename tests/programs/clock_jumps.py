"""Train while the clock jumps by hours, on one rank, then on all, for longer than any timeout.

Argument: a folder for checkpoints.
"""

from __future__ import annotations

import sys
import time

import light_torch  # noqa: F401

import torch
from checks import same_bits_everywhere

import gtopk
import gtopk.torch as hvd

STEPS, HOUR = 12, 3600.0
real = time.time
jump = 0.0
time.time = lambda: real() + jump

hvd.init()
model = torch.nn.Linear(20, 20)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    model.named_parameters(),
    hvd.Compression.gtopk(density=0.3),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(STEPS):
    if step in (3, 6, 9):
        ahead = {3: 5, 6: -5, 9: 24}[step]
        jump = ahead * HOUR if step == 9 or hvd.rank() == 0 else 0.0
    optimizer.zero_grad()
    model(torch.randn(4, 20)).square().sum().backward()
    optimizer.step()
    gtopk.save_checkpoint(sys.argv[1], model, optimizer, step=step + 1)
    time.sleep(0.25)
assert all(same_bits_everywhere(parameter) for parameter in model.parameters())
print("well\n", end="", flush=True)
