"""Momentum: the compression takes it before the selection, or the optimizer after it; not both.

Refuses optimizers that would take it a second time, and warns of optimizers that lose accuracy
after a selection, and of clipping that a correction makes wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from ..compression import ErrorFeedback, SparseCompression
from ..errors import page
from ..runtime.logs import EVERYWHERE
from .grad_scaler import is_unscaled, loss_scale
from .samples import norm_of
from .wrapped.adam_step import AgreedSteps

_log = logging.getLogger("gtopk")

# Clipping on purpose removes less, even of a velocity that sums ten gradients.
_FAR_SHORTER: Final = 0.1
_IN_A_ROW: Final = 3
_FIRST, _EVERY = 20, 50  # the first passes are all measured, then every 50th
_INSTEAD: Final = (
    "Leave clipping out, or give DistributedOptimizer local_clip_norm=, which clips each rank's "
    "gradients before the momentum"
)
_INSTEAD_OF_ADAM: Final = (
    "Leave clipping out, or give AdamW itself in place of SGD and adam_correction: "
    "global_clip_norm= then clips the mean gradient before the moments"
)


def require_one_momentum(
    optimizer: torch.optim.Optimizer, compression: ErrorFeedback | None, *, outer: bool = False
) -> None:
    """Raise ValueError for an optimizer whose momentum would be taken twice.

    outer: it is LocalSGD's outer optimizer, which cannot have adam_correction.
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


class ClippingWatch:
    """Warns, once, where a script clips the steps that a correction has made of gradients.

    Such steps are far longer than gradients: a limit that is right for gradients removes nearly all
    of them, and training stands still. Call `agree` after an exchange and `step` before the
    optimizer's. Norms are measured only while the script changes gradients between the two, and
    never without a correction.
    """

    def __init__(self, compression: object) -> None:
        self._compression: ErrorFeedback | None = None
        if isinstance(compression, ErrorFeedback) and compression.corrects:
            self._compression = compression
        self._scaler: Any = None
        self._agreed: AgreedSteps | None = None
        self._norms: dict[torch.Tensor, float] = {}  # of the agreed gradients, where measured
        self._is_changing = False  # the script changed gradients before the last step
        self._passes = self._short = 0  # passes with changes; passes in a row that were too short

    def agree(self, parameters: Iterable[torch.Tensor], scaler: Any) -> None:
        """Note that these parameters' gradients are now the agreed ones.

        scaler: the GradScaler that scales them, or None.
        """
        if self._compression is None:
            return
        stepped = [each for each in parameters if each.grad is not None]
        self._agreed, self._norms, self._scaler = AgreedSteps(stepped), {}, scaler
        self._passes += self._is_changing
        if self._is_changing and (self._passes <= _FIRST or self._passes % _EVERY == 0):
            self._norms = {each: _norm([each], loss_scale(scaler)) for each in stepped}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that an optimizer is about to step with."""
        if self._compression is None or (agreed := self._agreed) is None:
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        # torch counts no changes of a DTensor.
        self._is_changing = any(agreed.is_changed(p) or p.grad is not _local(p) for p in stepped)
        if not self._is_changing:
            return
        measured = [each for each in stepped if each in self._norms and each.grad is not None]
        if measured:
            scale = 1.0 if is_unscaled(self._scaler, optimizer) else loss_scale(self._scaler)
            before = math.hypot(*(self._norms[each] for each in measured))
            self.compare(before, _norm(measured, scale))

    def compare(self, agreed: float, applied: float) -> None:
        """Compare the norms of the agreed gradients and of those that are stepped with."""
        if self._compression is None or not math.isfinite(agreed):
            return
        self._short = self._short + 1 if applied < _FAR_SHORTER * agreed else 0
        if self._short < _IN_A_ROW:
            return
        adam = self._compression.adam_correction
        name = "adam_correction" if adam else "momentum_correction"
        _log.warning(
            "gradients are clipped to %.2g of their norm, and are no gradients by then: "
            "%s=%s has made steps of them, which are far longer, so that the model hardly learns. "
            "%s (%s)",
            applied / agreed,
            name,
            getattr(self._compression, name),
            _INSTEAD_OF_ADAM if adam else _INSTEAD,
            page("Clipping"),
            extra=EVERYWHERE,
        )
        self._compression = None  # said once


def _norm(parameters: Iterable[torch.Tensor], scale: float) -> float:
    """Return the norm of the parameters' gradients; of sharded ones, of this rank's shards."""
    gradients = map(_local, parameters)
    return norm_of([each for each in gradients if each is not None]) / scale


def _local(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient; of a sharded one this rank's shard."""
    gradient: torch.Tensor | None = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return gradient
