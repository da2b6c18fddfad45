"""The device of a rank: one of its node's GPUs, by its number on the node, or the CPU."""

from __future__ import annotations

import torch

import gtopk.torch as hvd


def own_device(name: str = "auto") -> torch.device:
    """Return this rank's device, made the current one; name: "cpu", "cuda", or what there is.

    Raises ValueError where there is no GPU to be used.
    """
    count = 0 if name == "cpu" else torch.cuda.device_count()
    if not count:
        if name == "cuda":
            raise ValueError("--device cuda needs a GPU that torch can use; torch sees none")
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % count)
    torch.cuda.set_device(device)
    return device
