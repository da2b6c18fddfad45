"""Print the bytes per parameter that steps need besides model, gradients and optimizer state.

The first argument is the way to train: one per process, as some memory of another is freed late.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import gtopk.torch as hvd
from gtopk.compression import Compression

VALUES = 20_000_000  # of 80 MB, so that freed memory is returned at once
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WAYS: dict[str, tuple[type[torch.optim.Optimizer], Any]] = {
    "dense": (torch.optim.SGD, Compression.none),
    "sparse": (torch.optim.SGD, Compression.gtopk(0.001)),
    "momentum": (torch.optim.SGD, Compression.gtopk(0.001, momentum_correction=0.9)),
    "adam_correction": (
        torch.optim.SGD,
        Compression.gtopk(0.001, adam_correction=(0.9, 0.999)),
    ),
    "adam": (torch.optim.AdamW, Compression.gtopk(0.001)),
    "adam, shards": (torch.optim.AdamW, Compression.shards()),
}


def megabytes(what: str) -> float:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1e3


def measure(
    kind: type[torch.optim.Optimizer], compression: Any, values: int = VALUES
) -> dict[str, float]:
    """Return the memory between steps, and the peak within one."""
    weight = torch.nn.Parameter(torch.ones(values))
    optimizer: Any = kind([weight], lr=1e-3)  # type: ignore[call-arg]
    weight.grad = torch.ones(values)
    for _ in range(2):
        optimizer.step()
    before = megabytes("VmRSS")
    optimizer = hvd.DistributedOptimizer(optimizer, [("weight", weight)], compression)
    peaks = []
    for _ in range(8):
        RESET.write_text("5")  # reset the peak
        weight.grad.fill_(1.0)
        optimizer.step()
        peaks.append(megabytes("VmHWM"))
    scale = 1e6 / values
    # The minimum over the steps after the first turns of the shards: on busy cores, the engine's
    # thread may release a step's arrays only after the next has started.
    return {
        "kept": scale * (megabytes("VmRSS") - before),
        "most": scale * (min(peaks[3:]) - before),
    }


hvd.init()
torch.set_num_threads(1)
way = WAYS[sys.argv[1]]
measure(*way, values=1000)  # what libraries load at first use does not count for a step
found = measure(*way)
if hvd.rank() == 0:
    print(json.dumps(found), flush=True)
hvd.barrier()
