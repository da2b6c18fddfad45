"""Ranks with a GPU each train, and open a context only on their own. Run one rank per GPU."""

import light_torch  # noqa: F401

import torch

import gtopk.torch as hvd

hvd.init()
own = torch.device("cuda", hvd.local_rank())
torch.manual_seed(0)
model = torch.nn.Linear(40, 50).to(own)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    model.named_parameters(),
    hvd.Compression.gtopk(0.25),
)
for _ in range(3):
    model(torch.randn(4, 40, device=own)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
opened = [gpu for gpu in range(hvd.size()) if torch._C._cuda_hasPrimaryContext(gpu)]
assert opened == [hvd.rank()], f"rank {hvd.rank()} has contexts on {opened}"
