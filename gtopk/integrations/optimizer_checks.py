"""Optimizer checks: examine the optimizers of a hook's model when they first step, and its passes.

A hook need not be given an optimizer. So an optimizer whose momentum would be taken twice is an
error in its first step, as is any other than the one whose steps the hook makes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from ..compression import ErrorFeedback
from ..errors import page
from ..optim.momentum import CorrectedGradients, log_advice, require_one_momentum
from ..optim.options import warn_of_few_entries
from ..optim.wrapped.adam_step import AgreedSteps, adam_before, require_plain
from .hook_state import HookSkips


class _Watch(NamedTuple):
    """One hook's check of optimizers, as long as the hook lives."""

    skips: weakref.ref[HookSkips]
    check: Callable[[torch.optim.Optimizer, HookSkips], None]


# Replaced as a whole, so that a step may iterate while another thread adds one. PyTorch iterates
# over its global hooks: removing ours when a communication hook is collected would break a step.
_watched: tuple[_Watch, ...] = ()
_adding = threading.Lock()


def _check_all(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Let all living hooks check an optimizer that is about to step."""
    for skips, check in _watched:
        alive = skips()
        if alive is not None:
            check(optimizer, alive)


def _watch(skips: HookSkips, check: Callable[[torch.optim.Optimizer, HookSkips], None]) -> None:
    global _watched
    with _adding:
        if not _watched:
            register_optimizer_step_pre_hook(_check_all)
        living = (each for each in _watched if each.skips() is not None)
        _watched = (*living, _Watch(weakref.ref(skips), check))


def _holds(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer | None) -> bool:
    """Tell whether an optimizer contains another, as torchtitan's OptimizersContainer does."""
    values = vars(optimizer).values()
    lists = (each for value in values if isinstance(value, list | tuple) for each in value)
    return any(each is inner for each in (*values, *lists))


def check_optimizers(
    skips: HookSkips,
    compression: ErrorFeedback,
    rank: int,
    *,
    says: bool,
    way: str,
    stepped: torch.optim.Optimizer | None = None,
    adam: str = "",
) -> CorrectedGradients:
    """Check each optimizer of the model once, at its first step, as long as the hook lives.

    Returns the gradients that a correction has made steps of, to refuse clipping: the hook calls
    `agree` after each pass.
    rank: in the world. says: also log what had better be done before the selection, and whether
        the density is too low.
    way: how to let the hook make an Adam's steps, in words.
    stepped: the optimizer whose steps the hook makes; any other one is a ValueError.
    adam: as of `CorrectedGradients`.
    """
    seen = weakref.WeakSet[torch.optim.Optimizer]()
    corrected = CorrectedGradients(compression, adam)
    # A weak reference: the optimizer's hooks keep the model, and a global list keeps `check`.
    makes_steps = stepped is not None
    of_hook = (lambda: None) if stepped is None else weakref.ref(stepped)

    has_warned = False  # not "nothing in `seen`": an optimizer that another replaces leaves it

    def check(optimizer: torch.optim.Optimizer, ours: HookSkips) -> None:
        nonlocal has_warned
        if optimizer in seen:
            corrected.require_unchanged(optimizer)
            return
        parameters = ours.parameters()
        theirs = (p for group in optimizer.param_groups for p in group["params"])
        if any(p in parameters for p in theirs):
            if makes_steps and optimizer is not of_hook():
                if _holds(optimizer, of_hook()):
                    return
                raise ValueError(
                    f"rank {rank}: the hook was given an optimizer whose steps it makes, and "
                    f"another {type(optimizer).__name__} steps its model: give the hook this one, "
                    "or adam_steps='after'"
                )
            if says and not has_warned:
                has_warned = True
                trained = sum(p.numel() for p in parameters if p.requires_grad)
                warn_of_few_entries(compression, trained)
            if not makes_steps:
                require_one_momentum(optimizer, compression)  # in each step, if the script goes on
                require_plain(optimizer.state.values(), rank)
                if says:
                    takes = adam_before(optimizer, compression) is not None
                    log_advice(optimizer, compression, way if takes else "")
            seen.add(optimizer)
            corrected.require_unchanged(optimizer)

    _watch(skips, check)
    return corrected


class PassWatch:
    """Raises where a backward pass adds its gradients to agreed steps, which are no gradients.

    made_by: who made the steps of gradients; "": gradients remain gradients, which may be added up.
    accumulating: how to add up passes, for the error.
    """

    def __init__(
        self, rank: int, made_by: str, accumulating: str = "within `with model.no_sync():`"
    ) -> None:
        self.agreed: AgreedSteps | None = None  # of the last pass
        self._rank, self._made_by, self.accumulating = rank, made_by, accumulating
        self._watched: dict[torch.Tensor, Any] = {}
        self._added: set[torch.Tensor] = set()  # parameters with gradients added to agreed steps

    def note(self, parameters: Iterable[torch.Tensor] | None) -> None:
        """Note that a pass has ended.

        parameters: whose gradients are agreed steps now; None: the pass does not count.
        """
        is_agreed = self._made_by and parameters is not None
        self.agreed = AgreedSteps(parameters or ()) if is_agreed else None

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError where this pass has added gradients to agreed steps.

        parameters: of the first bucket of a pass; they are checked from the next pass on. A pass
            that is not exchanged may add to agreed steps, as in a GAN.
        """
        parameters = list(parameters) if self._made_by else []
        if not self._added.isdisjoint(parameters):  # others get gradients later in this pass
            self._added.clear()
            raise self._error()
        for parameter in parameters:
            if parameter not in self._watched and parameter.requires_grad:
                self._watched[parameter] = parameter.register_hook(
                    _WeakGradientHook(self._track_gradient, parameter)
                )

    def require_cleared(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError where gradients of these parameters would be added to agreed steps.

        In place of `watch`, for a hook that runs before gradients are added.
        """
        agreed = self.agreed
        if agreed is None:
            return
        if any(agreed.is_in(each) and not agreed.is_changed(each) for each in parameters):
            raise self._error()

    def close(self) -> None:
        """Watch no more."""
        for handle in self._watched.values():
            handle.remove()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"rank {self._rank}: a backward pass has added its gradients to the agreed steps of "
            f"{self._made_by}, which the pass before has left in their place: have all passes of a "
            f"step but the last {self.accumulating}, and clear gradients (optimizer.zero_grad()) "
            "after step(). A pass whose gradients are thrown away, as the discriminator's in a "
            f"generator's step, belongs {self.accumulating}, too: exchanged, it takes from the "
            f"residual what no step applies ({page('Several models, and GANs')})"
        )

    def _track_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Note, before a pass adds to a gradient, whether it is still an agreed step."""
        if self.agreed is None or not self.agreed.is_in(parameter):
            self._added.discard(parameter)
        elif not self.agreed.is_changed(parameter):
            self._added.add(parameter)


class _WeakGradientHook:
    """A tensor's gradient hook: calls a function with the tensor, which it refers to weakly."""

    def __init__(self, call: Callable[[Any], None], tensor: torch.Tensor) -> None:
        self._call, self._of = call, TensorWeakRef(tensor)

    def __call__(self, gradient: torch.Tensor) -> None:
        self._call(self._of())
