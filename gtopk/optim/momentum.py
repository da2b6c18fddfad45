"""Momentum before the selection, by the compression, or behind it, by the optimizer: not both.

What is refused, and what is said of an optimizer where it is behind one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..compression import ErrorFeedback, SparseCompression

_log = logging.getLogger("gtopk")


def require_one_momentum(
    optimizer: torch.optim.Optimizer, compression: ErrorFeedback | None, *, outer: bool = False
) -> None:
    """Raise ValueError for an optimizer whose momentum would be taken twice.

    outer: it is that of LocalSGD, which has no adam_correction to offer.
    """
    if compression is None or not compression.corrects:
        return
    adam = compression.adam_correction
    correction = (
        f"adam_correction={adam}"
        if adam
        else f"momentum_correction={compression.momentum_correction}"
    )
    momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if momentum:
        more = "" if adam else more_weight_decay(momentum, optimizer.param_groups)
        raise ValueError(
            f"{correction} takes the momentum before selection: use an {'outer ' if outer else ''}"
            f"optimizer with momentum=0, not {momentum}{more}"
        )
    if any("betas" in group for group in optimizer.param_groups):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{correction} makes Adam's steps, and {kind} would make them again: use "
            "torch.optim.SGD with the same lr and weight_decay"
            if adam
            else f"{correction} is for SGD; {kind} has a momentum of its own: leave "
            f"momentum_correction at 0, or use SGD{'' if outer else ' and give adam_correction'}"
        )


def tell_of_optimizer(optimizer: torch.optim.Optimizer, compression: object, way: str = "") -> None:
    """Say what of this optimizer is better done before the selection; rank 0 does.

    way: how this one's steps can be made before, in words; "": they cannot.
    """
    if isinstance(compression, ErrorFeedback):
        _warn_of_second_moments(optimizer, compression, way)
        _tell_of_momentum(optimizer, compression)


def _warn_of_second_moments(
    optimizer: torch.optim.Optimizer, compression: ErrorFeedback, way: str
) -> None:
    """Warn of Adam and its kin behind a selection, and say the ways out."""
    betas = next((each["betas"] for each in optimizer.param_groups if "betas" in each), None)
    if betas is None:
        return
    if way:
        _log.warning(
            "%s after compression loses accuracy: it divides by the size of past updates, which "
            "are zero in most entries. Have its steps made before: %s (docs/tuning.md)",
            type(optimizer).__name__,
            way,
        )
        return
    times = ""
    if isinstance(compression, SparseCompression):
        updated = min(1.0, compression.density * compression.widening())
        times = f" (up to {updated**-0.5:.2g} times)"
    _log.warning(
        "%s after compression loses accuracy: it divides by the size of past updates, which are "
        "zero in most entries. Either raise the lr%s, or replace it by SGD(momentum=0, same "
        "weight_decay, up to 3 times the lr) and pass adam_correction=(%s) to the compression "
        "(docs/tuning.md)",
        type(optimizer).__name__,
        times,
        ", ".join(f"{float(beta):g}" for beta in betas),
    )


def _tell_of_momentum(optimizer: torch.optim.Optimizer, compression: ErrorFeedback) -> None:
    """Say, where SGD takes its momentum of what was selected, how it is taken before.

    Of plain momentum alone: `momentum_correction` is neither Nesterov's nor dampened.
    """
    if compression.corrects or not isinstance(optimizer, torch.optim.SGD):
        return
    plain = [
        group
        for group in optimizer.param_groups
        if group["momentum"] and not group["nesterov"] and not group["dampening"]
    ]
    if not plain:
        return
    momentum = float(plain[0]["momentum"])
    _log.info(
        "SGD's momentum of %g is applied after compression, which usually costs accuracy: set "
        "momentum_correction=%g in the compression, and in SGD momentum=0%s (docs/tuning.md)",
        momentum,
        momentum,
        more_weight_decay(momentum, plain),
    )


def more_weight_decay(momentum: float, groups: Iterable[Mapping[str, Any]]) -> str:
    """Return, in words to add to "momentum=0", what weight decay does the same without it.

    SGD adds it to the gradient before its momentum, which makes 1 / (1 - momentum) of it.
    """
    if momentum >= 1 or not any(group.get("weight_decay") for group in groups):
        return ""
    return f", and {1 / (1 - momentum):.3g} times the weight_decay"
