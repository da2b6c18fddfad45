"""Optimizer checks: examine the optimizers of a hook's model when they first step.

A hook need not be given an optimizer. So an optimizer whose momentum would be taken twice is an
error in its first step, as is any other than the one whose steps the hook makes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..compression import ErrorFeedback
from ..optim.momentum import CorrectedGradients, log_advice, require_one_momentum
from ..optim.options import warn_of_few_entries
from ..optim.wrapped.adam_step import adam_before, require_plain
from .hook_steps import HookSkips


class _Watch(NamedTuple):
    """One hook's check of optimizers, as long as the hook lives."""

    skips: weakref.ref[HookSkips]
    check: Callable[[torch.optim.Optimizer, HookSkips], None]


# Replaced as a whole, so that a step may iterate while another thread adds one. PyTorch iterates
# over its global hooks: removing ours when a communication hook is collected would break a step.
_watched: tuple[_Watch, ...] = ()
_adding = threading.Lock()


def _check_all(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Let all living hooks check an optimizer that is about to step."""
    for skips, check in _watched:
        alive = skips()
        if alive is not None:
            check(optimizer, alive)


def _watch(skips: HookSkips, check: Callable[[torch.optim.Optimizer, HookSkips], None]) -> None:
    global _watched
    with _adding:
        if not _watched:
            register_optimizer_step_pre_hook(_check_all)
        living = (each for each in _watched if each.skips() is not None)
        _watched = (*living, _Watch(weakref.ref(skips), check))


def _holds(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer | None) -> bool:
    """Tell whether an optimizer contains another, as torchtitan's OptimizersContainer does."""
    values = vars(optimizer).values()
    lists = (each for value in values if isinstance(value, list | tuple) for each in value)
    return any(each is inner for each in (*values, *lists))


def check_optimizers(
    skips: HookSkips,
    compression: ErrorFeedback,
    rank: int,
    *,
    says: bool,
    way: str,
    stepped: torch.optim.Optimizer | None = None,
    adam: str = "",
) -> CorrectedGradients:
    """Check each optimizer of the model once, at its first step, as long as the hook lives.

    Returns the gradients that a correction has made steps of, to refuse clipping: the hook calls
    `agree` after each pass.
    rank: in the world. says: also log what had better be done before the selection, and whether
        the density is too low.
    way: how to let the hook make an Adam's steps, in words.
    stepped: the optimizer whose steps the hook makes; any other one is a ValueError.
    adam: as of `CorrectedGradients`.
    """
    seen = weakref.WeakSet[torch.optim.Optimizer]()
    corrected = CorrectedGradients(compression, adam)
    # A weak reference: the optimizer's hooks keep the model, and a global list keeps `check`.
    makes_steps = stepped is not None
    of_hook = (lambda: None) if stepped is None else weakref.ref(stepped)

    def check(optimizer: torch.optim.Optimizer, ours: HookSkips) -> None:
        if optimizer in seen:
            corrected.require_unchanged(optimizer)
            return
        parameters = ours.parameters()
        theirs = (p for group in optimizer.param_groups for p in group["params"])
        if any(p in parameters for p in theirs):
            if makes_steps and optimizer is not of_hook():
                if _holds(optimizer, of_hook()):
                    return
                raise ValueError(
                    f"rank {rank}: the hook was given an optimizer whose steps it makes, and "
                    f"another {type(optimizer).__name__} steps its model: give the hook this one, "
                    "or adam_steps='after'"
                )
            if says and not seen:
                trained = sum(p.numel() for p in parameters if p.requires_grad)
                warn_of_few_entries(compression, trained)
            if not makes_steps:
                require_one_momentum(optimizer, compression)  # in each step, if the script goes on
                require_plain(optimizer.state.values(), rank)
                if says:
                    takes = adam_before(optimizer, compression) is not None
                    log_advice(optimizer, compression, way if takes else "")
            seen.add(optimizer)
            corrected.require_unchanged(optimizer)

    _watch(skips, check)
    return corrected
