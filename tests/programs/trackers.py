"""Run under torchrun on 2 ranks, with a folder: four steps, reported to Weights & Biases."""

import os
import sys

os.environ |= {"GTOPK_WANDB": "project", "WANDB_MODE": "offline", "WANDB_DIR": sys.argv[1]}
os.environ |= {"WANDB_SILENT": "true"}

import torch

import gtopk.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(30, 4)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    model.named_parameters(),
    hvd.Compression.gtopk(density=0.1),
)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
hvd.shutdown()
