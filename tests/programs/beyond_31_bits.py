"""Broadcast and sum tensors of 2^31 + 16 bytes on two ranks, and check their last elements."""

from __future__ import annotations

import light_torch  # noqa: F401

import torch

import gtopk.torch as hvd

hvd.init()
rank = hvd.rank()

sent = torch.full(((1 << 31) + 16,), rank, dtype=torch.uint8)
if rank == 0:
    sent[-1] = 7
hvd.broadcast_(sent, root_rank=0)
assert sent[0] == 0
assert sent[-1] == 7
assert int(sent[1 << 30 :].sum(dtype=torch.int64)) == 7
del sent

summed = torch.full(((1 << 29) + 4,), 1.0 + rank)
hvd.allreduce_(summed, op=hvd.Sum)
assert summed.min() == summed.max() == 3.0
print(f"rank {rank}: arrived whole\n", end="", flush=True)
