"""Momentum: the compression takes it before the selection, or the optimizer after it; not both.

Refuses optimizers that would take it a second time, and clipping that a correction makes wrong;
warns of optimizers that lose accuracy after a selection.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..compression import ErrorFeedback, SparseCompression
from ..errors import page
from ..exchange.buckets.parameters import parameters_of
from .grad_scaler import is_unscaled, loss_scale
from .options import instead_of_clipping

_log = logging.getLogger("gtopk")

_FIRST, _EVERY = 20, 50  # passes whose gradients are compared
# A norm that is taken twice differs by rounding; clipping takes far more than that.
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


def log_advice(optimizer: torch.optim.Optimizer, compression: object, way: str = "") -> None:
    """Log what this optimizer had better do before the selection; called on rank 0.

    way: how to make its steps before the exchange, in words; "": they cannot be.
    """
    if isinstance(compression, SparseCompression) and compression.density == 1.0:
        return  # every entry is in every update
    if isinstance(compression, ErrorFeedback):
        _warn_of_second_moments(optimizer, compression, way)
        _log_momentum_advice(optimizer, compression)


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
        # Entries that are updated in a part d of the steps, by u, have m = d u and v = d u^2:
        # Adam's steps of them, m / sqrt(v), are only sqrt(d) long.
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


def _log_momentum_advice(optimizer: torch.optim.Optimizer, compression: ErrorFeedback) -> None:
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
    """Steps in the place of gradients after an exchange: raises where a script shortens them.

    They are far longer than gradients: a norm to which gradients may be clipped removes nearly all
    of them, and training stands still. So it does where a GradScaler unscales steps of Adam, which
    have no scale. Norms are compared, as torch counts neither unscaling nor changes of a DTensor:
    in the first passes, and then in every 50th, since that reads all gradients twice. Call `agree`
    after an exchange, `require_unchanged` before the optimizer's step, and `forget` where gradients
    are cleared. Where gradients remain gradients, all three do nothing.

    adam: how to clip where AdamW's steps were made, as a sentence; empty where they were not.
    """

    def __init__(self, compression: object, adam: str = "") -> None:
        self._made_by, self._instead = "AdamW" if adam else "", adam
        self._is_linear = False  # momentum may be scaled and unscaled; Adam's steps may not
        if isinstance(compression, ErrorFeedback) and compression.corrects:
            self._made_by, self._instead = compression.correction, instead_of_clipping(compression)
            self._is_linear = compression.adam_correction is None
        self._scaler: Any = None
        self._passes = 0
        # By parameter its gradient, and the norm of that; both weak, for `zero_grad` frees them.
        self._agreed = WeakTensorKeyDictionary()

    def agree(self, parameters: Iterable[torch.Tensor], scaler: Any) -> None:
        """Note that these parameters' gradients, and no others, are now the agreed ones.

        scaler: the GradScaler that scales them, or None.
        """
        self.forget()
        if not self._made_by:
            return
        self._scaler = scaler
        self._passes += 1
        if self._passes <= _FIRST or self._passes % _EVERY == 0:
            stepped = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
            for parameter, norm in zip(stepped, _norms(stepped, loss_scale(scaler)), strict=True):
                assert parameter.grad is not None
                self._agreed[parameter] = TensorWeakRef(parameter.grad), norm

    def forget(self) -> None:
        """Forget the agreed gradients."""
        self._agreed.clear()

    def require_unchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError where a script has shortened what this optimizer is about to step with.

        Gradients that are all zero were cleared, and new ones come in a closure.
        """
        if not self._agreed:
            return
        # A weak reference to a gradient that is no more is None, too.
        having = [p for p in parameters_of(optimizer) if p in self._agreed and p.grad is not None]
        here = [p for p in having if self._agreed[p][0]() is p.grad]
        if not here:
            return
        before = math.hypot(*(self._agreed[p][1] for p in here))
        scale = 1.0 if is_unscaled(self._scaler, optimizer) else loss_scale(self._scaler)
        now = math.hypot(*_norms(here, scale))
        if not math.isfinite(before) or not 0.0 < now < _SHORTER * before:
            return
        if self._is_linear and _is_power_of_two(before / now):
            return  # a GradScaler that the optimizer was not given has unscaled it
        raise ValueError(
            "gradients were shortened between their exchange and step(), to 1 / "
            f"{before / now:.3g}, where they are steps that {self._made_by} has made, and far "
            "longer than gradients: leave clip_grad_norm_ (or a trainer's option for it) out. "
            f"{self._instead.rstrip('.')}. A GradScaler must be given as scaler= "
            f"({page('Clipping')})"
        )


def _norms(parameters: Sequence[torch.Tensor], scale: float) -> list[float]:
    """Return the norm of each parameter's gradient over `scale`; waits for a GPU once.

    Of sharded ones this rank's shards'.
    """
    found = []
    for parameter in parameters:
        gradient: Any = getattr(parameter.grad, "_local_tensor", parameter.grad)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        found.append(torch.linalg.vector_norm(gradient.detach(), dtype=wide).double())
    if not found:
        return []
    values: list[float] = torch.stack([each.to(found[0].device) for each in found]).tolist()
    return [value / scale for value in values]


def _is_power_of_two(ratio: float) -> bool:
    """Tell whether a ratio of two norms is a power of two, up to their rounding."""
    power = math.log2(ratio)
    return abs(power - round(power)) < 1e-5
