"""A worker ends in a given way in the middle of an epoch; the others take over its samples.

Arguments: the rank that ends, how ("killed", "exit" or "exception"), a folder for results, and
whether the others call shutdown() ("yes" or "no").
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import light_torch  # noqa: F401

import torch
from torch.utils.data import DataLoader, TensorDataset

import gtopk.torch as hvd

LENGTH, EPOCHS, ENDS_IN_EPOCH = 200, 3, 1


def main(rank: int, how: str, folder: Path, shuts_down: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    data = TensorDataset(torch.arange(LENGTH), torch.randn(LENGTH, 4))
    loader = hvd.adapt(
        DataLoader(data, 10), optimizer, "hogbatch", sizes={"cpu": 10}, ranks_may_leave=True
    )
    mine, ending = folder / f"rank-{hvd.rank()}", folder / "ending"
    for epoch in range(EPOCHS):
        for indices, x in loader:
            if epoch == ENDS_IN_EPOCH and hvd.rank() == rank:
                ending.touch()
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "exit":
                    sys.exit()
                raise RuntimeError("boom")
            while epoch == ENDS_IN_EPOCH and not ending.exists():
                time.sleep(0.01)  # otherwise a slow one finds the epoch done without it
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            with mine.open("a") as file:
                file.write("".join(f"{epoch} {index}\n" for index in indices.tolist()))
    report = loader.report()
    again = sum(worker.taken_over for worker in report.workers)
    text = f"rank {hvd.rank()} is done; {report.updates} updates; computed again: {again}"
    print(f"{text}\n", end="", flush=True)
    if shuts_down == "yes":
        hvd.shutdown()


main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
