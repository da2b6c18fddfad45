"""A model in DistributedDataParallel whose optimizer exchanges gradients, too: refused by name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import torch


def refuse_ddp(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise ValueError where DDP reduces the gradients of one of these parameters already.

    DDP leaves no mark on a parameter, but keeps all of them in a list, which is found from them. A
    walk over all objects would hold tuples that other threads are making: CPython raises then.
    """
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    ours = list(parameters)
    # DDP needs torch's process group; where there is none, the tenth of a second is saved.
    if not (ddp and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    lists = [
        each for each in gc.get_referrers(*ours) if isinstance(each, list) and each is not ours
    ]
    for owner in gc.get_referrers(*lists):
        kept = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if "reducer" in kept and any(kept.get("_module_parameters") is each for each in lists):
            raise ValueError(
                "DistributedDataParallel and DistributedOptimizer both reduce this model's "
                "gradients, and DDP sends them whole: give DistributedOptimizer the plain model, "
                "or keep DDP with gtopk.ddp.gtopk_hook and a plain optimizer"
            )
