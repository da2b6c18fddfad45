"""A job whose last save is asynchronous, and which then ends in a given way.

Arguments: the folder, the way, and the rank whose disk is full by then; -1: none.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import light_torch  # noqa: F401

import torch

import gtopk
import gtopk.torch as hvd
from gtopk.torch.checkpoint import archive

folder, way, full = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
SECONDS = 2.0


def write_slowly(*arguments: object, write=archive.write_part) -> None:
    time.sleep(SECONDS)
    write(*arguments)


def save(step: int, asynchronous: bool = False) -> None:
    gtopk.save_checkpoint(folder, model, optimizer, step=step, asynchronous=asynchronous)


def train() -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


hvd.init()
rank = hvd.rank()
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    model.named_parameters(),
    hvd.Compression.gtopk(0.5),
)
train()
save(1)
if hvd.rank() == full:
    beside = folder / "checkpoint-00000002-step-2" / f"rank-{full}-of-{hvd.size()}.json.part"
    beside.parent.mkdir()
    beside.symlink_to("/dev/full")
hvd.barrier()
match way:
    case "shutdown":
        save(2, asynchronous=True)
        hvd.shutdown()
    case "termination":
        with gtopk.termination() as preempted:
            if hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            while not preempted:
                train()
            save(2, asynchronous=True)
    case "the writing takes longer":
        archive.write_part = write_slowly
        save(2, asynchronous=True)
    case "a thread of it lives on":
        save(2, asynchronous=True)
        threading.Thread(target=time.sleep, args=(SECONDS,)).start()
    case "rank 0 takes longer":
        save(2, asynchronous=True)
        time.sleep(2 * SECONDS if hvd.rank() == 0 else 0)
    case "the others go on":
        save(2, asynchronous=True)
        while hvd.rank() != 1:
            train()
    case "an exception is handled":
        save(2, asynchronous=True)
        try:
            raise ValueError("boom")
        except ValueError:
            hvd.shutdown()
    case _:
        save(2, asynchronous=True)
print(f"rank {rank} is at its end\n", end="", flush=True)
