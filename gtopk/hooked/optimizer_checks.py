"""The optimizers of a model whose gradients a hook exchanges: looked at when they first step.

A hook is given no optimizer. That its momentum would be taken twice is an error of its first step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..compression import ErrorFeedback
from ..step.momentum import require_one_momentum, tell_of_optimizer
from .hook_skips import HookSkips


def look_at_optimizers(skips: HookSkips, compression: ErrorFeedback, says: bool) -> None:
    """Look once at each optimizer that steps a parameter of the model, as long as the hook lives.

    says: also say what is better done before the selection: rank 0 does.
    """
    seen = weakref.WeakSet[torch.optim.Optimizer]()
    alive = weakref.ref(skips, lambda _: handle.remove())

    def look(optimizer: torch.optim.Optimizer, *call: Any) -> None:
        ours = alive()
        if ours is None or optimizer in seen:
            return
        parameters = ours.parameters()
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if any(p in parameters for p in stepped):
            require_one_momentum(optimizer, compression)  # again, where the script goes on
            if says:
                tell_of_optimizer(optimizer, compression)
            seen.add(optimizer)

    handle = register_optimizer_step_pre_hook(look)
