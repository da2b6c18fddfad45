"""Run alone: torch.multiprocessing starts two ranks, one of which raises in a step if spawned."""

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import gtopk.ddp


def worker(rank: int, size: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    model = DistributedDataParallel(torch.nn.Linear(40, 10))
    model.register_comm_hook(gtopk.ddp.GTopKState(0.1), gtopk.ddp.gtopk_hook)
    for step in range(3):
        if (rank, step, sys.argv[2]) == (1, 2, "spawn"):
            raise KeyError("no such word")
        model(torch.ones(4, 40)).sum().backward()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.start_processes(worker, (2, sys.argv[1]), 2, start_method=sys.argv[2])
