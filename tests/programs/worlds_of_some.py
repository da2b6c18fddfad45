"""Worlds of some of 3 ranks, then of all; "group": over the program's own process group."""

import os
import sys

import torch

import gtopk.torch as hvd

rank = int(os.environ["RANK"])
if sys.argv[1] == "group":
    torch.distributed.init_process_group("gloo")
for some in ([0, 1], [1, 2], [1, 2]):
    if rank in some:
        hvd.init(comm=some)
        assert hvd.rank() == some.index(rank)
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == sum(some)
        hvd.shutdown()
hvd.init()
assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == 3
hvd.shutdown()
print("well\n", end="", flush=True)
