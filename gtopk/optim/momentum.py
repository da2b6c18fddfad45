"""Momentum: the compression takes it before the selection, or the optimizer after it; not both.

Refuses optimizers that would take it a second time, and clipping that a correction makes wrong;
warns of optimizers that lose accuracy after a selection.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from ..compression import ErrorFeedback, SparseCompression
from ..errors import page
from .grad_scaler import is_unscaled, loss_scale
from .options import instead_of_clipping
from .samples import norm_of
from .wrapped.adam_step import AgreedSteps

_log = logging.getLogger("gtopk")

# torch counts no changes of a DTensor: the norms of shards are compared after so many passes, and
# then after each of so many.
_FIRST, _EVERY = 20, 50
_SHORTER: Final = 0.999


def require_one_momentum(
    optimizer: torch.optim.Optimizer, compression: ErrorFeedback | None, *, outer: bool = False
) -> None:
    """Raise ValueError for an optimizer whose momentum would be taken twice.

    outer: it is LocalSGD's outer optimizer, which cannot have adam_correction.
    """
    if compression is None or not compression.corrects:
        return
    adam, correction = compression.adam_correction, compression.correction
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
    """Log what this optimizer had better do before the selection; called on rank 0.

    way: how to make its steps before the exchange, in words; "": they cannot be.
    """
    if isinstance(compression, ErrorFeedback):
        _warn_of_second_moments(optimizer, compression, way)
        _tell_of_momentum(optimizer, compression)


def _warn_of_second_moments(
    optimizer: torch.optim.Optimizer, compression: ErrorFeedback, way: str
) -> None:
    """Warn of Adam and its kin after a selection, and say what to do instead."""
    betas = next((each["betas"] for each in optimizer.param_groups if "betas" in each), None)
    if betas is None:
        return
    if way:
        _log.warning(
            "%s after compression loses accuracy: it divides by the size of past updates, which "
            "are zero in most entries. Have its steps made before: %s (%s)",
            type(optimizer).__name__,
            way,
            page("Tuning"),
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
        "(%s)",
        type(optimizer).__name__,
        times,
        ", ".join(f"{float(beta):g}" for beta in betas),
        page("Tuning"),
    )


def _tell_of_momentum(optimizer: torch.optim.Optimizer, compression: ErrorFeedback) -> None:
    """Log how to take SGD's momentum before the selection, where SGD takes it after.

    Only for plain momentum: `momentum_correction` is neither Nesterov's nor dampened.
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
        "momentum_correction=%g in the compression, and in SGD momentum=0%s (%s)",
        momentum,
        momentum,
        more_weight_decay(momentum, plain),
        page("Tuning"),
    )


def more_weight_decay(momentum: float, groups: Iterable[Mapping[str, Any]]) -> str:
    """Return words to add to "momentum=0": the weight decay that has the same effect without it.

    SGD adds the decay to the gradient before its momentum, which multiplies it by
    1 / (1 - momentum). Empty where there is no weight decay.
    """
    if momentum >= 1 or not any(group.get("weight_decay") for group in groups):
        return ""
    return f", and {1 / (1 - momentum):.3g} times the weight_decay"


class CorrectedGradients:
    """Steps in the place of gradients after an exchange: raises where a script changes them.

    They are far longer than gradients: a norm to which gradients may be clipped removes nearly all
    of them, and training stands still. Call `agree` after an exchange and `require_unchanged`
    before the optimizer's step. Where gradients remain gradients, both do nothing.
    sharded_adam: how to clip where AdamW has made the steps, as a sentence. Changes that torch
        counts are found elsewhere then; those of DTensors, which it does not count, are found here.
    """

    def __init__(self, compression: object, sharded_adam: str = "") -> None:
        self._made_by, self._instead = "AdamW" if sharded_adam else "", sharded_adam
        if isinstance(compression, ErrorFeedback) and compression.corrects:
            self._made_by, self._instead = compression.correction, instead_of_clipping(compression)
        self._scaler: Any = None
        self._agreed: AgreedSteps | None = None
        self._norms: dict[torch.Tensor, float] = {}  # of shards, where measured
        self._passes = 0

    def agree(self, parameters: Iterable[torch.Tensor], scaler: Any) -> None:
        """Note that these parameters' gradients, and no others, are now the agreed ones.

        scaler: the GradScaler that scales them, or None.
        """
        if not self._made_by:
            return
        stepped = [each for each in parameters if each.grad is not None]
        self._agreed = AgreedSteps([] if self._made_by == "AdamW" else stepped)
        self._norms, self._scaler = {}, scaler
        self._passes += 1
        if self._passes <= _FIRST or self._passes % _EVERY == 0:
            sharded = (each for each in stepped if each.grad is not _local(each))
            self._norms = {each: _norm([each], loss_scale(scaler)) for each in sharded}

    def require_unchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError where a script has changed what this optimizer is about to step with."""
        if (agreed := self._agreed) is None:
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(agreed.is_changed, stepped)) or self._is_shorter(stepped, optimizer):
            raise ValueError(
                "gradients were changed between their exchange and step(), where they are steps "
                f"that {self._made_by} has made, and far longer than gradients: leave "
                "clip_grad_norm_ (or a trainer's option for it) out. "
                f"{self._instead} ({page('Clipping')})"
            )

    def _is_shorter(
        self, stepped: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> bool:
        shards = [each for each in stepped if each in self._norms and each.grad is not None]
        if not shards:
            return False
        scale = 1.0 if is_unscaled(self._scaler, optimizer) else loss_scale(self._scaler)
        before = math.hypot(*(self._norms[each] for each in shards))
        return math.isfinite(before) and _norm(shards, scale) < _SHORTER * before


def _norm(parameters: Iterable[torch.Tensor], scale: float) -> float:
    """Return the norm of the parameters' gradients; of sharded ones, of this rank's shards."""
    gradients = map(_local, parameters)
    return norm_of([each for each in gradients if each is not None]) / scale


def _local(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient; of a sharded one this rank's shard."""
    gradient: torch.Tensor | None = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return gradient
