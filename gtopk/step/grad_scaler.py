"""GradScaler: what its scale is to gradients that are reduced, and when it may take it away.

Each rank's scaler looks for overflows in what it unscales. In the reduced gradients, which are the
same on all ranks, all of them see the same; in a rank's own it alone does, and scales part.
"""

from __future__ import annotations

from typing import Any, Final

import torch

RECIPE: Final = (
    "Use\n"
    "    optimizer.synchronize()\n"
    "    scaler.unscale_(optimizer)\n"
    "    with optimizer.skip_synchronize():\n"
    "        scaler.step(optimizer)"
)


def loss_scale(scaler: Any) -> float:
    """Return what a GradScaler has multiplied the gradients with; 1 without one."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    return float(scaler.get_scale())


def require_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where the scaler has unscaled the gradients before they are reduced."""
    states = getattr(scaler, "_per_optimizer_states", {})
    if id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED":
        raise ValueError(_unscale_between("it has unscaled them before they were reduced"))


def require_no_fused_unscaling(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError in a scaler's step of a fused optimizer, which reduces as it unscales."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ValueError(_unscale_between("a fused optimizer unscales when it steps"))


def _unscale_between(why: str) -> str:
    return (
        f"other ranks cannot see the overflows of this rank's GradScaler, and scales part: {why}. "
        f"{RECIPE}"
    )
