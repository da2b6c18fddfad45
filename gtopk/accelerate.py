"""Accelerate: gTop-k for a model that `Accelerator.prepare` has wrapped in DDP.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gtopk.accelerate.compress(accelerator, model, optimizer, density=0.01)

`accelerator.save_state` and `load_state` then include the residuals of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .ddp import GTopKState, gtopk_hook, state_for

__all__ = ["compress"]


def compress(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    density: float = 0.001,
    **options: Any,
) -> GTopKState:
    """Exchange a prepared model's gradients with gTop-k, and return the state of its hook.

    model, optimizer: as `accelerator.prepare` returned them; give several optimizers as a sequence.
        A single optimizer is passed to the state: AdamW's steps are then made before the selection,
        and global_clip_norm= replaces accelerator.clip_grad_norm_.
    density, options: the arguments of `gtopk.ddp.GTopKState`, including compression=.
    Raises ValueError if the model is not wrapped in DistributedDataParallel, and TypeError for an
    object that is not an accelerator or optimizer.
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        raise TypeError(
            f"compress(accelerator, model, optimizer) got a {type(accelerator).__name__} first"
        )
    # With a dynamo_backend, Accelerate compiles the model after wrapping it in DDP.
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "gtopk.accelerate.compress needs a model that accelerator.prepare has wrapped in "
            f"DistributedDataParallel, got {type(model).__name__} on "
            f"{accelerator.num_processes} processes ({accelerator.distributed_type})"
        )
    state = state_for(optimizer, density, **{"scaler": accelerator.scaler, **options})
    model.register_comm_hook(state, gtopk_hook)
    # Otherwise save_state() would lose the residuals.
    accelerator.register_for_checkpointing(state.stateful(model))
    return state
