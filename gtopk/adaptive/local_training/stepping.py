"""Stepping: a mode's own step in place of the distributed optimizer's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any


def take_over(
    optimizer: Any, mode: str, step: Callable[[Callable[[], Any] | None], Any]
) -> Callable[..., Any]:
    """Let `optimizer.step` be this from now on, and its gradients a mode's; return what it was."""
    before: Callable[..., Any] = optimizer.step

    @wraps(before)  # with the mark of a scheduler made before, which would miss it
    def own_step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        optimizer._opt_called = optimizer._wrapped._opt_called = True  # schedulers look for it
        return step(closure)

    # Bound to the optimizer: a learning-rate scheduler made later wraps it once more.
    optimizer.step = MethodType(own_step, optimizer)
    optimizer._reducer.stand_aside(mode)
    return before


def require_not_taken(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose step a mode has taken over."""
    if mode := optimizer._reducer.aside_for:
        raise ValueError(
            f"the optimizer is adapted already, in mode {mode!r}, and exchanges no gradients of "
            "its own any more. For another loader wrap a new plain optimizer by "
            "DistributedOptimizer, after loader.drain(); or, from a hogbatch mode, whose model "
            "stays shared memory, go on in another job, by a checkpoint"
        )


def require_no_common_step(optimizer: Any, why: str) -> None:
    """Raise ValueError for options that only a step of all ranks could heed; why: it has none."""
    asked = optimizer._options
    for name, value in (
        ("local_clip_norm", asked.local_clip_norm),
        ("global_clip_norm", asked.global_clip_norm),
        ("scaler", optimizer.scaler),
        ("check_every", asked.check_every or None),
    ):
        if value is not None:
            raise ValueError(f"{why}: it takes no {name}")
