"""The optimizers of a model whose gradients a hook exchanges: looked at when they first step.

A hook may be given no optimizer. That its momentum would be taken twice is an error of its first
step, and so is an optimizer that is not the one whose steps the hook makes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..compression import ErrorFeedback
from ..step.momentum import require_one_momentum, tell_of_optimizer
from ..wrapped.adam_step import adam_before, require_plain
from .hook_skips import HookSkips


def look_at_optimizers(
    skips: HookSkips,
    compression: ErrorFeedback,
    rank: int,
    *,
    says: bool,
    way: str,
    stepped: torch.optim.Optimizer | None = None,
) -> None:
    """Look once at each optimizer that steps a parameter of the model, as long as the hook lives.

    rank: in the world. says: also say what is better done before the selection.
    way: how to have the hook make an Adam's steps, in words.
    stepped: the optimizer whose steps the hook makes, which is the only one then.
    """
    seen = weakref.WeakSet[torch.optim.Optimizer]()
    alive = weakref.ref(skips, lambda _: handle.remove())
    of_hook = (lambda: None) if stepped is None else weakref.ref(stepped)

    def look(optimizer: torch.optim.Optimizer, *call: Any) -> None:
        ours = alive()
        if ours is None or optimizer in seen:
            return
        parameters = ours.parameters()
        theirs = (p for group in optimizer.param_groups for p in group["params"])
        if any(p in parameters for p in theirs):
            if stepped is not None and optimizer is not of_hook():
                raise ValueError(
                    f"rank {rank}: the hook was given an optimizer whose steps it makes, and "
                    f"another {type(optimizer).__name__} steps its model: give the hook this one, "
                    "or adam_steps='after'"
                )
            if stepped is None:
                require_one_momentum(optimizer, compression)  # again, where the script goes on
                require_plain(optimizer.state.values(), rank)
                if says:
                    takes = adam_before(optimizer, compression) is not None
                    tell_of_optimizer(optimizer, compression, way if takes else "")
            seen.add(optimizer)

    handle = register_optimizer_step_pre_hook(look)
