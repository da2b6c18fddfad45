"""Train on the digits with gTop-k, and check on every rank that nothing is lost.

Arguments: the API, and which one is shut down first.
    gtopk      gtopk.torch, over the launcher's transport
    horovod    Horovod itself, with only the optimizer from gtopk.horovod

Prints a line per rank: its rank, and the hash of its weights.
"""

from __future__ import annotations

import hashlib
import importlib
import sys

import torch

from gtopk.runtime.world import world
from models.data import load
from models.mlp import mlp

FACE, FIRST_TO_END = sys.argv[1:]
STEPS, BATCH = 12, 16

hvd = importlib.import_module({"gtopk": "gtopk.torch", "horovod": "horovod.torch"}[FACE])
face = importlib.import_module({"gtopk": "gtopk.torch", "horovod": "gtopk.horovod"}[FACE])

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert world.is_initialized() == (FACE == "gtopk"), "gtopk's world opens with the optimizer"
torch.manual_seed(rank)
model = mlp(hidden=16).double()
optimizer = face.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.5 + rank),
    named_parameters=model.named_parameters(),
    compression=face.Compression.gtopk(density=0.05),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
face.broadcast_optimizer_state(optimizer, root_rank=0)
assert world.current().transport.name == ("horovod" if FACE == "horovod" else "mpi")
assert (world.current().rank, world.current().size) == (rank, size)

data = load("digits", seed=0).train


def weights() -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


begun = weights()
gradients = torch.zeros_like(begun)
for step in range(STEPS):
    optimizer.zero_grad()
    chosen = [(rank + size * (step * BATCH + n)) % len(data) for n in range(BATCH)]
    x, y = data[chosen]
    torch.nn.functional.cross_entropy(model(x.double()), y).backward()
    gradients += torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
# Then gradients of zero, until the residuals have been sent.
before = begun
while not torch.equal(before, weights()):
    before = weights()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()

moved = begun - weights()
mean = hvd.allreduce(gradients, name="gradients of all steps")
assert mean.abs().max() > 0.01
torch.testing.assert_close(moved, 0.5 * mean, rtol=0, atol=1e-12)

optimizer.step()  # a rank that is done may shut Horovod down at once
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
line = f"rank {rank} of {size}: {digest.hexdigest()}\n"
if FIRST_TO_END == "horovod":
    hvd.shutdown()
    face.shutdown()
elif FIRST_TO_END == "gtopk":
    face.shutdown()
    hvd.shutdown()
else:
    assert FIRST_TO_END == "program"
print(line, end="", flush=True)
