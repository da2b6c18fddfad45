"""Train a little with gtopk; every rank prints its place and the hash of its weights."""

import hashlib

import light_torch  # noqa: F401

import torch

import gtopk.torch as hvd
from gtopk.runtime.world import world

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    model.named_parameters(),
    hvd.Compression.gtopk(density=0.1),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
here = world.current()
line = (
    f"{here.transport.name} {here.rank}/{here.size} local {here.local_rank}/{here.local_size} "
    f"cross {here.cross_rank}/{here.cross_size} {digest.hexdigest()}"
)
print(f"{line}\n", end="", flush=True)
hvd.shutdown()
