"""Checks of how a script uses gradients: each misuse is an error that names the fix.

momentum            applied by the compression before the selection, or by the optimizer after it,
                    not by both; if before, gradients must not be clipped (`CorrectedGradients`)
a second exchange   by DDP, or by another optimizer of the same parameters (`SharedParameters`)
GradScaler          must not unscale before the sum: each rank's scaler checks the gradients that
                    it unscales for overflow. All ranks see the same overflows in the reduced
                    gradients, but not in their own, and then their scales diverge

Also warns of optimizers that lose accuracy after a selection. `loss_scale` reads a GradScaler's
scale.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..compression import ErrorFeedback, SparseCompression
from ..errors import page
from ..exchange.buckets.parameters import parameters_of, require_optimizer
from .options import instead_of_clipping

_log = logging.getLogger("gtopk")

_FIRST, _EVERY = 20, 50  # passes in which gradients are compared
# Two computations of a norm differ by rounding; clipping changes it far more.
_SHORTER: Final = 0.999

RECIPE: Final = (
    "Use\n"
    "    optimizer.synchronize()\n"
    "    scaler.unscale_(optimizer)\n"
    "    with optimizer.skip_synchronize():\n"
    "        scaler.step(optimizer)"
)


def require_one_momentum(
    optimizer: torch.optim.Optimizer, compression: ErrorFeedback | None, *, outer: bool = False
) -> None:
    """Raise ValueError for an optimizer whose momentum would be applied twice.

    outer: it is LocalSGD's outer optimizer, which cannot have adam_correction.
    """
    if compression is None or not compression.corrects:
        return
    adam, correction = compression.adam_correction, compression.correction
    momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if momentum:
        more = "" if adam else more_weight_decay(momentum, optimizer.param_groups)
        raise ValueError(
            f"{correction} applies the momentum before selection: use an "
            f"{'outer ' if outer else ''}optimizer with momentum=0, not {momentum}{more}"
        )
    if any("betas" in group for group in optimizer.param_groups) or (
        adam and _is_adaptive(optimizer)
    ):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{correction} computes Adam's steps, and {kind} would compute them again: use "
            "torch.optim.SGD with the same lr and weight_decay"
            if adam
            else f"{correction} is for SGD; {kind} has a momentum of its own: leave "
            f"momentum_correction at 0, or use SGD"
        )


def make_outer(
    outer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    parameters: Collection[torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """Create LocalSGD's outer optimizer, and check that it steps exactly these parameters.

    Raises TypeError if `outer` does not return an optimizer; ValueError for LBFGS, or if the
    optimizer has other parameters: changes of those that it leaves out would be lost.
    """
    if not callable(outer):
        raise TypeError(f"outer= must be a function of a list of parameters, got {outer!r:.99}")
    optimizer = outer([*parameters])
    require_optimizer(optimizer, "the result of outer=")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS needs a closure, and the outer step has none: use another outer=")
    stepped = {*parameters_of(optimizer)}
    if stepped != {*parameters}:
        raise ValueError(
            f"the outer optimizer must step the {len(parameters)} parameters that outer= is given, "
            f"got {len(stepped.intersection(parameters))} of them and "
            f"{len(stepped.difference(parameters))} others: create it from its argument, as in "
            "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
        )
    return optimizer


def log_advice(optimizer: torch.optim.Optimizer, compression: object, hint: str = "") -> None:
    """Log how to move this optimizer's momentum or steps before the selection; for rank 0.

    hint: how to have its steps computed before the exchange, for the message; "": not possible.
    """
    if isinstance(compression, SparseCompression) and compression.density == 1.0:
        return  # every entry is in every update
    if isinstance(compression, ErrorFeedback):
        _warn_of_second_moments(optimizer, compression, hint)
        _log_momentum_advice(optimizer, compression)


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer scales its steps by past gradients: Adam, RMSprop, Rprop."""
    # These options show it, also of classes from other libraries. LARS and Muon have eps, too, but
    # scale whole tensors; like SGD they have Nesterov's momentum.
    return any(
        not group.keys().isdisjoint(("betas", "etas"))
        or ("eps" in group and "nesterov" not in group)
        for group in optimizer.param_groups
    )


def _warn_of_second_moments(
    optimizer: torch.optim.Optimizer, compression: ErrorFeedback, hint: str
) -> None:
    """Warn of Adam and similar optimizers after a selection, and say what to do instead."""
    if not _is_adaptive(optimizer):
        return
    if hint:
        advice = f"To compute its steps before: {hint}"
    else:
        times = ""
        # Rprop's steps have the size of its lr, whatever the gradient's.
        if isinstance(compression, SparseCompression) and "etas" not in optimizer.param_groups[0]:
            # Entries that are updated in a fraction d of the steps, by u, have m = d u and
            # v = d u^2, so Adam's steps for them, m / sqrt(v), are only sqrt(d) long.
            updated = min(1.0, compression.density * compression.widening())
            times = f" (up to {updated**-0.5:.2g} times)"
        advice = (
            f"Either raise the lr{times}, or use torch's own AdamW with Compression.shards() and "
            "adam_steps='before', which computes its steps before"
        )
    _log.warning(
        "%s after compression loses accuracy: it scales its steps by past updates, which are zero "
        "in most entries. %s (%s)",
        type(optimizer).__name__,
        advice,
        page("Tuning"),
    )


def _log_momentum_advice(optimizer: torch.optim.Optimizer, compression: ErrorFeedback) -> None:
    """Log how to apply SGD's momentum before the selection, if SGD applies it after.

    Only for plain momentum: `momentum_correction` supports neither Nesterov nor dampening.
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
    """Return text to add to "momentum=0": the weight decay that has the same effect without it.

    SGD adds the decay to the gradient before its momentum, which multiplies it by
    1 / (1 - momentum). Empty without weight decay.
    """
    if momentum >= 1 or not any(group.get("weight_decay") for group in groups):
        return ""
    return f", and {1 / (1 - momentum):.3g} times the weight_decay"


class CorrectedGradients:
    """Detect that a script clips or unscales gradients that are really optimizer steps.

    After an exchange with correction, gradients hold steps, which are far longer than gradients:
    clipping to a norm meant for gradients removes nearly all of them, and training stalls. A
    GradScaler that unscales Adam's steps, which have no scale, does the same. The check compares
    norms, because torch counts neither unscaling nor changes of a DTensor; it runs in the first
    passes and then in every 50th, because it reads all gradients twice. Call `agree` after an
    exchange, `require_unchanged` before the optimizer's step, and `forget` when gradients are
    cleared. If gradients remain gradients, all three do nothing.

    adam: how to clip if AdamW's steps are computed, as a sentence; empty if they are not.
    """

    def __init__(self, compression: object, adam: str = "") -> None:
        self._made_by, self._instead = "AdamW" if adam else "", adam
        self._is_linear = False  # momentum may be scaled and unscaled; Adam's steps may not
        if isinstance(compression, ErrorFeedback) and compression.corrects:
            self._made_by, self._instead = compression.correction, instead_of_clipping(compression)
            self._is_linear = compression.adam_correction is None
        self._scaler: Any = None
        self._passes = 0
        # By parameter: gradient and norm. Parameter and gradient are weak: `zero_grad` frees them.
        self._agreed = WeakTensorKeyDictionary()

    def agree(self, parameters: Iterable[torch.Tensor], scaler: Any) -> None:
        """Record these parameters' gradients, and no others, as the agreed ones.

        scaler: the GradScaler whose scale they have, or None.
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
        """Forget the recorded gradients."""
        self._agreed.clear()

    def require_unchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if a script has shortened the steps that this optimizer will apply.

        Gradients that are all zero are accepted: they were cleared, and a closure computes new
        ones.
        """
        if not self._agreed:
            return
        # A weak reference to a deleted gradient is None, too.
        recorded = [p for p in parameters_of(optimizer) if p in self._agreed and p.grad is not None]
        unreplaced = [p for p in recorded if self._agreed[p][0]() is p.grad]
        if not unreplaced:
            return
        before = math.hypot(*(self._agreed[p][1] for p in unreplaced))
        scale = 1.0 if is_unscaled(self._scaler, optimizer) else loss_scale(self._scaler)
        now = math.hypot(*_norms(unreplaced, scale))
        if not math.isfinite(before) or not 0.0 < now < _SHORTER * before:
            return
        if self._is_linear and _is_power_of_two(before / now):
            return  # unscaled by a GradScaler that was not passed to the optimizer
        raise ValueError(
            "gradients were scaled down between their exchange and step(), to 1 / "
            f"{before / now:.3g}, when they hold steps computed by {self._made_by}, which are far "
            "longer than gradients: leave out clip_grad_norm_ (or a trainer's option for it). "
            f"{self._instead.rstrip('.')}. A GradScaler must be passed as scaler= "
            f"({page('Clipping')})"
        )


def _norms(parameters: Sequence[torch.Tensor], scale: float) -> list[float]:
    """Return the norm of each parameter's gradient over `scale`; waits for a GPU once.

    For sharded gradients, the norm of this rank's shards.
    """
    norms = []
    for parameter in parameters:
        gradient: Any = getattr(parameter.grad, "_local_tensor", parameter.grad)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=wide).double())
    if not norms:
        return []
    values: list[float] = torch.stack([each.to(norms[0].device) for each in norms]).tolist()
    return [value / scale for value in values]


def _is_power_of_two(ratio: float) -> bool:
    """Return whether a ratio of two norms is a power of two, up to their rounding."""
    power = math.log2(ratio)
    return abs(power - round(power)) < 1e-5


def refuse_ddp(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise ValueError if DDP already reduces the gradients of one of these parameters."""
    # DDP needs torch's process group; without one, save the tenth of a second that a search takes.
    if not (
        "torch.nn.parallel.distributed" in sys.modules
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        return
    if ddps_of(parameters):
        raise ValueError(
            "DistributedDataParallel and DistributedOptimizer both reduce this model's "
            "gradients, and DDP sends them whole: give DistributedOptimizer the plain model, "
            "or keep DDP with gtopk.ddp.gtopk_hook and a plain optimizer"
        )


def ddps_of(parameters: Iterable[torch.Tensor]) -> list[Mapping[str, Any]]:
    """Return the attributes of each DDP that reduces gradients of these parameters.

    DDP leaves no mark on a parameter, but keeps its parameters in a list, which the garbage
    collector can find from a parameter. Do not walk all objects instead: that would hold tuples
    that other threads are still filling, and CPython then raises.
    """
    listed = list(parameters)
    lists = [
        each for each in gc.get_referrers(*listed) if isinstance(each, list) and each is not listed
    ]
    found = []
    for owner in gc.get_referrers(*lists):
        # Since Python 3.11 an object may have no dict; it is then the referrer itself.
        attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if "reducer" in attributes and any(
            attributes.get("_module_parameters") is each for each in lists
        ):
            found.append(attributes)
    return found


class SharedParameters:
    """Track, for one optimizer, the other optimizers that step some of the same parameters.

    Call `note_agreed` after an exchange, `refuse_agreed` before the next, and `note_step` after a
    step. The optimizer created or stepped last sets the others aside until they are used. Otherwise
    an optimizer of a finished training phase, kept alive by a scheduler, would count this one's
    passes as its own, and set its parameters to the center minus its residual.
    """

    def __init__(
        self, names: Mapping[torch.nn.Parameter, str], set_aside: Callable[[], None]
    ) -> None:
        """set_aside: the method that sets this optimizer aside; referred to weakly."""
        self._names, self._set_aside = names, WeakMethod(set_aside)
        self._others: WeakSet[SharedParameters] = WeakSet()
        self._agreed: dict[torch.nn.Parameter, tuple[TensorWeakRef, int]] = {}
        with _instances_lock:
            for other in _sharing(names):
                self._others.add(other)
                other._others.add(self)
            _instances.add(self)
        self._set_others_aside()

    def _set_others_aside(self) -> None:
        # A copy: another thread may add a new optimizer meanwhile.
        with _instances_lock:
            others = [*self._others]
        for other in others:
            other.set_aside()

    def set_aside(self) -> None:
        """Set this optimizer aside until it is used again."""
        if (set_aside := self._set_aside()) is not None:
            set_aside()

    def note_step(self) -> None:
        """Record that the optimizer has stepped, with the gradients that it agreed on."""
        self.note_agreed()
        if self._others:
            self._set_others_aside()

    def note_agreed(self) -> None:
        """Record that the gradients are agreed ones, exchanged by this optimizer."""
        self._agreed = {
            p: (TensorWeakRef(p.grad), p.grad._version)
            for p in (self._names if self._others else ())
            if p.grad is not None
        }

    def refuse_agreed(self, rank: int) -> None:
        """Raise ValueError if another optimizer has already exchanged a gradient."""
        # A copy: another thread may add a new optimizer meanwhile.
        with _instances_lock:
            others = [*self._others]
        for parameter in self._names if others else ():
            if any(other._has_agreed(parameter) for other in others):
                raise ValueError(
                    f"rank {rank}: two DistributedOptimizers step parameter "
                    f"'{self._names[parameter]}' after one backward pass, and its gradient would "
                    "be exchanged twice: give each parameter to one of them, or run a backward "
                    "pass of its own for each"
                )

    def _has_agreed(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a gradient is the recorded one, and unchanged since."""
        if parameter.grad is None or parameter not in self._agreed:
            return False
        gradient, version = self._agreed[parameter]
        return gradient() is parameter.grad and version == parameter.grad._version


_instances_lock: Final = threading.Lock()  # ranks may be threads
_instances: Final[WeakSet[SharedParameters]] = WeakSet()


def _sharing(parameters: Iterable[torch.nn.Parameter]) -> list[SharedParameters]:
    """Return the instances of living optimizers that have any of these parameters."""
    listed = [*parameters]
    return [each for each in _instances if any(parameter in each._names for parameter in listed)]


def set_aside_optimizers_of(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set aside all DistributedOptimizers with any of these parameters, until used again."""
    with _instances_lock:
        others = _sharing(parameters)
    for other in others:
        other.set_aside()


class _ScaleCopy:
    """An asynchronous copy of a scale from a GPU to the host."""

    def __init__(self, scale: torch.Tensor) -> None:
        self._scale, self._version = scale, scale._version
        # Pinned: a copy from a GPU into pageable memory would block the host.
        self._host_scale = torch.empty_like(scale, device="cpu", pin_memory=scale.is_cuda)
        self._host_scale.copy_(scale, non_blocking=True)
        self._copied = (
            torch.cuda.current_stream(scale.device).record_event() if scale.is_cuda else None
        )

    def is_current(self, scale: torch.Tensor) -> bool:
        """Return whether this is a copy of the current scale; `update` changes that in place."""
        return scale is self._scale and scale._version == self._version

    def value(self) -> float:
        """Return the scale; waits until the GPU has made the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host_scale)


_scale_copies: Final[WeakKeyDictionary[Any, _ScaleCopy]] = WeakKeyDictionary()


def prefetch_scale(scaler: Any) -> None:
    """Start copying the scale from a GPU, so that `loss_scale` need not wait during backward."""
    scale = None if scaler is None or not scaler.is_enabled() else _gpu_scale(scaler)
    if scale is not None and not (
        scaler in _scale_copies and _scale_copies[scaler].is_current(scale)
    ):
        _scale_copies[scaler] = _ScaleCopy(scale)


def require_scaler(scaler: Any) -> None:
    """Raise TypeError for an object that is not a GradScaler, such as True."""
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(f"scaler must be the GradScaler that scales the loss, got {scaler!r:.99}")


def loss_scale(scaler: Any) -> float:
    """Return the factor by which a GradScaler has multiplied the gradients; 1 without one.

    A scale on a GPU is read once per update of the scale.
    """
    if scaler is None or not scaler.is_enabled():
        return 1.0
    if _gpu_scale(scaler) is None:
        return float(scaler.get_scale())
    prefetch_scale(scaler)
    return _scale_copies[scaler].value()


def _gpu_scale(scaler: Any) -> torch.Tensor | None:
    """Return the tensor that holds the scale, if it is on a GPU, else None."""
    scale: torch.Tensor | None = getattr(scaler, "_scale", None)  # none before the first loss
    return scale if scale is not None and scale.is_cuda else None


def is_unscaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler has unscaled this optimizer's gradients since its last update."""
    # torch has no public way to ask, and its enum of stages is private: compare the stage's name.
    states = getattr(scaler, "_per_optimizer_states", {})
    return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"


def require_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the scaler has unscaled the gradients before they are reduced."""
    if is_unscaled(scaler, optimizer):
        raise ValueError(_unscale_between("it has unscaled them before they were reduced"))


def require_no_fused_unscaling(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a scaler steps a fused optimizer, which unscales within `step`."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ValueError(_unscale_between("a fused optimizer unscales when it steps"))


def _unscale_between(why: str) -> str:
    return (
        f"a GradScaler that unscales before gradients are reduced sees this rank's overflows only, "
        f"and the ranks' loss scales diverge: {why}. {RECIPE}"
    )
