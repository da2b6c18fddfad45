"""A model in DistributedDataParallel whose optimizer exchanges gradients, too: refused by name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import torch


def refuse_ddp(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise ValueError where DDP reduces the gradients of one of these parameters already.

    DDP leaves no mark on a parameter: its instances are looked for among all objects, once.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None or not torch.distributed.is_available():
        return
    ours = set(parameters)
    for each in gc.get_objects():
        is_ddp = issubclass(type(each), module.DistributedDataParallel)  # proxies have a __class__
        if is_ddp and not ours.isdisjoint(each.parameters()):
            raise ValueError(
                "DistributedDataParallel and DistributedOptimizer both reduce this model's "
                "gradients, and DDP sends them whole: give DistributedOptimizer the plain model, "
                "or keep DDP with gtopk.ddp.gtopk_hook and a plain optimizer"
            )
