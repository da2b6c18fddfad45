"""Optimizer checks: examine the optimizers of a hook's model when they first step, and its passes.

A hook need not be given an optimizer. So an optimizer whose momentum would be taken twice is an
error in its first step, as is any other than the one whose steps the hook makes.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import TensorWeakRef

from ..compression import ErrorFeedback
from ..errors import page
from ..optim.momentum import CorrectedGradients, log_advice, require_one_momentum
from ..optim.options import warn_of_few_entries
from ..optim.wrapped.adam_step import AgreedSteps, adam_before, require_plain
from .hook_steps import HookSkips

_log = logging.getLogger("gtopk")

Residuals = Callable[[], Iterable[tuple[torch.nn.Parameter, torch.Tensor]]]


class _Watch(NamedTuple):
    """One hook's check of optimizers, as long as the hook lives; seen: those of its model."""

    skips: weakref.ref[HookSkips]
    check: Callable[[torch.optim.Optimizer, HookSkips], None]
    seen: weakref.WeakSet[torch.optim.Optimizer]


# Replaced as a whole, so that a step may iterate while another thread adds one. PyTorch iterates
# over its global hooks: removing ours when a communication hook is collected would break a step.
_watched: tuple[_Watch, ...] = ()
_adding = threading.Lock()


def _check_all(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Let all living hooks check an optimizer that is about to step."""
    for skips, check, _ in _watched:
        alive = skips()
        if alive is not None:
            check(optimizer, alive)


def _note_step(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Let all living hooks know that an optimizer has stepped their models."""
    for skips, _, seen in _watched:
        alive = skips()
        if alive is not None and optimizer in seen:
            alive.is_due = False


def _watch(
    skips: HookSkips,
    check: Callable[[torch.optim.Optimizer, HookSkips], None],
    seen: weakref.WeakSet[torch.optim.Optimizer],
) -> None:
    global _watched
    with _adding:
        if not _watched:
            register_optimizer_step_pre_hook(_check_all)
            register_optimizer_step_post_hook(_note_step)
        living = (each for each in _watched if each.skips() is not None)
        _watched = (*living, _Watch(weakref.ref(skips), check, seen))


def _holds(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer | None) -> bool:
    """Tell whether an optimizer contains another, as torchtitan's OptimizersContainer does."""
    values = vars(optimizer).values()
    lists = (each for value in values if isinstance(value, list | tuple) for each in value)
    return any(each is inner for each in (*values, *lists))


def warn_of_lost_residual(
    rank: int, optimizer: torch.optim.Optimizer, norm: float | None = None
) -> None:
    """Warn that an optimizer goes on from earlier steps without the state of an earlier hook.

    norm: of the residual that was saved, where it is known.
    """
    _log.warning(
        "rank %d: %s goes on from earlier steps, and the state of the hook was not loaded: what "
        "this rank had not sent is lost%s. Save state_dict(model) of the hook's state on every "
        "rank, or gather_state(model) on one, and give it to load_state_dict (%s)",
        rank,
        type(optimizer).__name__,
        "" if norm is None else f" (a norm of {norm:.3g} on the rank that saved)",
        page("Checkpoints"),
    )


class ResidualNote:
    """The residual's norm in the groups of an optimizer's saved state.

    By it a run that goes on without the hook's state is known, where the optimizer itself has no
    state, as SGD. Live groups have none, but from loading on until `take`.
    residuals: a method of the hook's bucket exchanges, to which this refers weakly.
    """

    _KEY: Final = "gtopk_residual_norm"

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = weakref.WeakMethod(residuals)

    def add_to_saved(self, optimizer: torch.optim.Optimizer) -> None:
        """Note it in every `state_dict` of this optimizer from now on."""
        optimizer.register_state_dict_post_hook(self._add)

    def _add(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if (residuals := self._residuals()) is None:
            return
        norm = math.hypot(*(float(part.norm()) for _, part in residuals()))
        for group in state_dict["param_groups"] if norm else ():
            group[self._KEY] = norm

    @classmethod
    def take(cls, optimizer: torch.optim.Optimizer) -> float | None:
        """Remove it from an optimizer whose state was loaded, and return it; None: it has none."""
        norms = [group.pop(cls._KEY) for group in optimizer.param_groups if cls._KEY in group]
        return max(norms, default=None)


def check_optimizers(
    skips: HookSkips,
    compression: ErrorFeedback,
    rank: int,
    *,
    says: bool,
    way: str,
    stepped: torch.optim.Optimizer | None = None,
    adam: str = "",
    residuals: Residuals | None = None,
) -> CorrectedGradients:
    """Check each optimizer of the model once, at its first step, as long as the hook lives.

    Returns the gradients that a correction has made steps of, to refuse clipping: the hook calls
    `agree` after each pass.
    rank: in the world. says: also log what had better be done before the selection, and whether
        the density is too low.
    way: how to let the hook make an Adam's steps, in words.
    stepped: the optimizer whose steps the hook makes; any other one is a ValueError.
    adam: as of `CorrectedGradients`.
    residuals: as of `ResidualNote`, to tell where the hook's state is not loaded with an
        optimizer's; None: that is not told.
    """
    seen = weakref.WeakSet[torch.optim.Optimizer]()
    corrected = CorrectedGradients(compression, adam)
    # A weak reference: the optimizer's hooks keep the model, and a global list keeps `check`.
    makes_steps = stepped is not None
    of_hook = (lambda: None) if stepped is None else weakref.ref(stepped)

    has_warned = False  # not "nothing in `seen`": an optimizer that another replaces leaves it
    has_stepped = False
    note = None if residuals is None else ResidualNote(residuals)

    def check(optimizer: torch.optim.Optimizer, ours: HookSkips) -> None:
        nonlocal has_warned, has_stepped
        if optimizer in seen:
            ResidualNote.take(optimizer)
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
            if note is not None:
                norm = note.take(optimizer)
                if norm is not None and not (has_stepped or ours.is_loaded):
                    warn_of_lost_residual(rank, optimizer, norm)
                note.add_to_saved(optimizer)
            has_stepped = True
            seen.add(optimizer)
            corrected.require_unchanged(optimizer)

    _watch(skips, check, seen)
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
