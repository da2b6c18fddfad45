"""GradScaler: reads its scale, and refuses to let it unscale gradients before they are reduced.

Each rank's scaler looks for overflows in what it unscales. In the reduced gradients, which are the
same on all ranks, all of them see the same; in a rank's own it alone does, and the ranks' scales
diverge.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

RECIPE: Final = (
    "Use\n"
    "    optimizer.synchronize()\n"
    "    scaler.unscale_(optimizer)\n"
    "    with optimizer.skip_synchronize():\n"
    "        scaler.step(optimizer)"
)


class _Reading:
    """An asynchronous copy of a scale from a GPU to the host."""

    def __init__(self, scale: torch.Tensor) -> None:
        self._scale, self._version = scale, scale._version
        # Pinned: a copy from a GPU into pageable memory makes the host wait for it.
        self._here = torch.empty_like(scale, device="cpu", pin_memory=scale.is_cuda)
        self._here.copy_(scale, non_blocking=True)
        self._come = (
            torch.cuda.current_stream(scale.device).record_event() if scale.is_cuda else None
        )

    def is_of(self, scale: torch.Tensor) -> bool:
        """Tell whether the copy is of the scale as it is now: `update` changes it in place."""
        return scale is self._scale and scale._version == self._version

    def value(self) -> float:
        """Return the scale; wait until the GPU has made the copy."""
        if self._come is not None:
            self._come.synchronize()
        return float(self._here)


_readings: Final[WeakKeyDictionary[Any, _Reading]] = WeakKeyDictionary()


def begin_to_read_scale(scaler: Any) -> None:
    """Begin to copy the scale from a GPU, so that `loss_scale` need not wait during backward."""
    scale = None if scaler is None or not scaler.is_enabled() else _on_gpu(scaler)
    if scale is not None and not (scaler in _readings and _readings[scaler].is_of(scale)):
        _readings[scaler] = _Reading(scale)


def loss_scale(scaler: Any) -> float:
    """Return the factor that a GradScaler has multiplied the gradients with; 1 without one.

    A scale on a GPU is read once for each time that it is updated.
    """
    if scaler is None or not scaler.is_enabled():
        return 1.0
    if _on_gpu(scaler) is None:
        return float(scaler.get_scale())
    begin_to_read_scale(scaler)
    return _readings[scaler].value()


def _on_gpu(scaler: Any) -> torch.Tensor | None:
    """Return the tensor that holds the scale, if it is on a GPU, else None."""
    scale: torch.Tensor | None = getattr(scaler, "_scale", None)  # none before the first loss
    return scale if scale is not None and scale.is_cuda else None


def is_unscaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the scaler has unscaled this optimizer's gradients since its last update."""
    # torch has no public way to ask, and its enum of stages is private: by the stage's name.
    states = getattr(scaler, "_per_optimizer_states", {})
    return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"


def require_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where the scaler has unscaled the gradients before they are reduced."""
    if is_unscaled(scaler, optimizer):
        raise ValueError(_unscale_between("it has unscaled them before they were reduced"))


def require_no_fused_unscaling(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError in a scaler's step of a fused optimizer, which unscales within `step`."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ValueError(_unscale_between("a fused optimizer unscales when it steps"))


def _unscale_between(why: str) -> str:
    return (
        f"a GradScaler that unscales before gradients are reduced sees this rank's overflows only, "
        f"and the ranks' loss scales diverge: {why}. {RECIPE}"
    )
