"""Accelerate: what `Accelerator.prepare` has wrapped in DDP exchanges gradients by gTop-k.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gtopk.accelerate.compress(accelerator, model, optimizer, density=0.01)

`accelerator.save_state` and `load_state` then keep the residuals of all ranks, too.
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
    """Let a prepared model's gradients go by gTop-k, and return the state of its hook.

    model, optimizer: as `accelerator.prepare` returned them; a sequence of several optimizers. One
        alone is given to the state: AdamW's steps are then made before the selection, and
        global_clip_norm= takes the place of accelerator.clip_grad_norm_.
    density, options: as `gtopk.ddp.GTopKState` takes them, compression= among them.
    Raises ValueError where the model is not wrapped in DistributedDataParallel, TypeError for what
    is no optimizer.
    """
    # With a dynamo_backend the model is compiled last, around DDP.
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "gtopk.accelerate.compress needs a model that accelerator.prepare has wrapped in "
            f"DistributedDataParallel, got {type(model).__name__} on "
            f"{accelerator.num_processes} processes ({accelerator.distributed_type})"
        )
    state = state_for(optimizer, density, scaler=accelerator.scaler, **options)
    model.register_comm_hook(state, gtopk_hook)
    # Without it save_state() would lose what the ranks have not sent.
    accelerator.register_for_checkpointing(state.stateful(model))
    return state
