"""One rank fails in a way that its peers do not notice by themselves; the argument names it.

A second argument, "without streams": all ranks close descriptors 0 and 1, as daemons do.
"""

import os
import signal
import sys
import time

if sys.argv[2:] == ["without streams"]:
    os.close(0)
    os.close(1)
    os.execv(
        sys.executable, [sys.executable, *sys.argv[:2]]
    )  # Python itself lacks the streams, too

import light_torch  # noqa: F401

import torch

import gtopk.torch as hvd

way = sys.argv[1]
hvd.init()
culprit = hvd.rank() == 1


class RunsOutOfMemoryOnce(hvd.Compression.none):
    failed = False

    @classmethod
    def compress(cls, tensor):
        if culprit and not cls.failed:
            cls.failed = True
            raise RuntimeError("out of memory")
        return tensor, None


match way:
    case "an operation fails and the script goes on":
        model = torch.nn.Linear(5, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), compression=RunsOutOfMemoryOnce
        )
        errors = 0
        for _ in range(4):
            model.weight.grad = torch.ones_like(model.weight)
            before = model.weight.detach().clone()
            try:
                optimizer.step()
            except RuntimeError as error:
                errors += 1
                print(f"rank {hvd.rank()}: {error}\n", end="", flush=True)
                assert torch.equal(model.weight, before)
        assert errors == 4  # no rank continues with another step's messages
    case "an exception passes a finally":
        try:
            if culprit:
                raise ValueError("boom")
            time.sleep(60)
        finally:
            hvd.shutdown()
    case "a peer is frozen":
        if culprit:
            print(f"frozen {os.getpid()}\n", end="", flush=True, file=sys.stderr)
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            hvd.barrier()
        finally:
            hvd.shutdown()
