"""A rank of a recorded and traced run in which rank 2 is killed."""

from __future__ import annotations

import os
import signal
import time

import light_torch  # noqa: F401

import torch

import gtopk
import gtopk.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(40, 50)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    model.named_parameters(),
    hvd.Compression.gtopk(0.25),
)
for step in range(40):
    model(torch.randn(4, 40)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    gtopk.log(loss=1.0 / (step + 1))
    if step == 30 and hvd.rank() == 2:
        time.sleep(0.5)  # by then, all notes are written
        os.kill(os.getpid(), signal.SIGKILL)
