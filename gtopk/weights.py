"""Weights: what a rank's gradients are multiplied with before anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def loss_scale(scaler: Any) -> float:
    """Return what a GradScaler has multiplied the gradients with; 1 without one."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    return float(scaler.get_scale())


def local_clip(
    parameters: Sequence[torch.nn.Parameter], allowed_norm: float | None, ranks: int, scale: float
) -> float:
    """Return the factor that shortens this rank's gradient to its share of the norm allowed.

    scale: what the gradients are multiplied with; the norm is meant without it.
    The share is 1/sqrt(ranks): sums of as many independent gradients have the norm allowed
    (Lin et al. 2018, section 3.2). What is not finite is not shortened: the step is skipped.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if allowed_norm is None or not gradients:
        return 1.0
    parts = [g._values() if g.is_sparse else g for g in gradients]
    norms = torch.stack([norm.double().cpu() for norm in torch._foreach_norm(parts)])
    norm = float(norms.norm()) / scale
    share = allowed_norm / math.sqrt(ranks)
    return min(1.0, share / norm) if 0.0 < norm < math.inf else 1.0
