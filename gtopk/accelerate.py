"""Accelerate: what `Accelerator.prepare` has wrapped in DDP exchanges gradients by gTop-k.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gtopk.accelerate.compress(accelerator, model, optimizer, density=0.01)

`accelerator.save_state` and `load_state` then keep the residuals of all ranks, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .ddp import GTopKState, gtopk_hook
from .optim.wrapped.adam_step import plain

__all__ = ["compress"]


class _Held:
    """What the accelerator saves and loads of a state: on all ranks, and files on the first."""

    def __init__(self, state: GTopKState, model: torch.nn.Module) -> None:
        self._state, self._model = state, model

    def state_dict(self) -> dict[str, Any]:
        return self._state.gather_state(self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load_state_dict(state, self._model)


def compress(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    density: float = 0.001,
    **options: Any,
) -> GTopKState:
    """Let a prepared model's gradients go by gTop-k, and return the state of its hook.

    model, optimizer: as `accelerator.prepare` returned them; a sequence of several optimizers. One
        alone is given to the state: AdamW's steps are then made before the selection, and
        global_clip_norm= takes the place of accelerator.clip_grad_norm_.
    density, options: as `gtopk.ddp.GTopKState` takes them, compression= among them.
    Raises ValueError where the model is not wrapped in DistributedDataParallel, TypeError for what
    is no optimizer.
    """
    model = getattr(model, "_orig_mod", model)  # compiled last, with a dynamo_backend
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "gtopk.accelerate.compress needs a model that accelerator.prepare has wrapped in "
            f"DistributedDataParallel, got {type(model).__name__} on "
            f"{accelerator.num_processes} processes ({accelerator.distributed_type})"
        )
    prepared = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    own = [*map(plain, prepared)]
    given = {"optimizer": own[0] if len(own) == 1 else None, **options}
    state = GTopKState(density, scaler=accelerator.scaler, **given)
    model.register_comm_hook(state, gtopk_hook)
    for each in own if len(own) > 1 else []:
        each.register_step_pre_hook(state.drop_skipped)
    accelerator.register_for_checkpointing(_Held(state, model))
    return state
