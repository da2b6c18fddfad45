"""HookedAdam: a hook computes Adam or AdamW steps, and the optimizer's `step` applies them.

forward     of a model in training: parameters become c - a (`wrapped.local_residual`)
backward    the communication hook returns agreed steps in place of gradients
step()      a hook of the optimizer subtracts them, and hides them from the optimizer's own code
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from ..errors import check_number, page
from ..exchange.adamw import (
    REMOVED,
    SHARED,
    SHARED_ROWS,
    STEP,
    UNKNOWN,
    AdamGroups,
    Hyper,
    rows_of,
    step_count,
)
from ..exchange.buckets.parameters import parameters_of
from ..optim.peers import Peers
from ..optim.wrapped.adam_step import apply_agreed_steps, keep_precision
from ..optim.wrapped.local_residual import LocalResidual, on_this_rank
from .optimizer_checks import HookSkips, PassWatch, warn_of_lost_residual

_log = logging.getLogger("gtopk")

Residuals = Callable[[], Iterator[tuple[torch.nn.Parameter, torch.Tensor]]]

# By optimizer: the last HookedAdam created for it, as a script may create several. The optimizer's
# hooks keep it alive; a strong reference here would keep the optimizer and the model alive.
_owners: Final[WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[HookedAdam]]] = (
    WeakKeyDictionary()
)


class HookGroups(AdamGroups):
    """The parameter groups of an optimizer, for buckets of DDP or FSDP.

    Such a bucket may include frozen parameters, which a step skips.
    """

    def read(self, parameters: Sequence[torch.Tensor]) -> list[Hyper | None]:
        """Return the options; raise ValueError for a parameter that the optimizer does not step."""
        found: list[Hyper | None] = []
        for parameter, hyper in zip(parameters, super().read(parameters), strict=True):
            if parameter.requires_grad and hyper is REMOVED:
                raise ValueError(
                    f"the optimizer does not step a parameter of shape {list(parameter.shape)} "
                    "that the hook exchanges: pass one Adam or AdamW for all parameters of the "
                    "model, freeze those that are not trained (requires_grad_(False)), or pass "
                    "adam_steps='after'"
                )
            found.append(hyper if parameter.requires_grad else None)
        return found

    def create_states(self) -> bool:
        """Create every parameter's initial state, if this step is for that; return whether it was.

        torch.distributed.checkpoint only loads into existing state, so it first steps with
        learning rates and gradients of zero, to create the state of every parameter.
        """
        groups = self._optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        if self._optimizer.state or any(float(group["lr"]) for group in groups):
            return False
        if not parameters or any(bool(on_this_rank(p.grad).any()) for p in parameters):
            return False
        for parameter in parameters:
            shared, rows = self.initial_state(parameter)
            state = {STEP: step_count(0.0), SHARED: shared, SHARED_ROWS: rows}
            self._optimizer.state[parameter] = state
        return True

    def initial_state(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a parameter's shared second moment and row sums before the first step."""
        # In float32 or wider: second moments of 16-bit gradients underflow in 16 bits.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        rows = torch.zeros(rows_of(parameter), dtype=dtype, device="cpu")
        return torch.full_like(parameter, UNKNOWN, dtype=dtype), rows


class HookedAdam:
    """Make an optimizer's `step` apply the agreed steps that a hook leaves in the gradients.

    The hook calls `passes.note`, then `note` or `forget`, when a pass has ended.

    groups: the options and state from which the hook computes the steps.
    skips: of the model's passes. residuals: returns each parameter's residual after the last pass.
    local_residual: whether training forward passes include this rank's unsent steps.
    swapped: called when parameters have become c - a, or the center.
    passes: has the agreed steps, and watches for passes that add to them.
    clipping: for errors: how to clip gradients, as a sentence without its full stop.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        skips: HookSkips,
        peers: Peers,
        residuals: Residuals,
        passes: PassWatch,
        *,
        local_residual: bool,
        groups: HookGroups,
        swapped: Callable[[], None],
        clipping: str,
    ) -> None:
        self.groups = groups
        self._passes, self._clipping = passes, clipping
        self.peers, self.residuals = peers, residuals
        self._optimizer, self._skips = optimizer, skips
        self._local = LocalResidual(self, "state", swapped) if local_residual else None
        self._is_due = False  # whether agreed steps wait to be applied
        self._has_warned = False
        self._has_residual = False  # from a pass, or loaded
        self._lacks_residual = False  # the optimizer has taken steps, but their residual is missing
        self._in_closure = False
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # gradients, during a step
        self._loading: Mapping[str, Any] = {}
        # Two of them would apply the same agreed steps twice.
        if (owner_ref := _owners.get(optimizer)) is not None and (owner := owner_ref()) is not None:
            owner.detach()
        _owners[optimizer] = ref(self)
        self._check_missing_residual()
        self._pre_hook = optimizer.register_step_pre_hook(self._before_step)
        self._other_hooks = [
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    @property
    def names(self) -> Mapping[torch.nn.Parameter, str]:
        """Return the optimizer's parameters; only the model knows their names."""
        return dict.fromkeys(parameters_of(self._optimizer), "")

    def detach(self) -> None:
        """Remove all hooks: the optimizer then steps as usual, or for another state."""
        self.forget()
        if self._local is not None:
            # Its residual will no longer be sent, so forward passes must not include it.
            self._local.eval()
        for handle in (self._pre_hook, *self._other_hooks):
            handle.remove()
        self._passes.close()

    def _warn_of_unused(self) -> None:
        """Warn, once, if no step has applied what the previous pass exchanged."""
        if self._is_due and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rank %d: gradients of a backward pass were exchanged, and no step() has applied "
                "them: what that pass took from the residual is lost. Run a pass whose gradients "
                "are thrown away, as the discriminator's in a generator's step, %s (%s)",
                self.peers.world.rank,
                self._passes.accumulating,
                page("Several models, and GANs"),
            )

    def note(self, *, is_repeated: bool = False) -> None:
        """Record that a pass that counts has ended: gradients are now agreed steps.

        is_repeated: it is the same pass, with its gradients written again.
        """
        if not is_repeated:
            self._warn_of_unused()
        self._is_due = self._has_residual = True
        # Register the hook again, so that it runs after later hooks, which may clip. Not within a
        # closure: torch is then iterating over these hooks, and their dict must not change.
        if not self._in_closure:
            self._pre_hook.remove()
            self._pre_hook = self._optimizer.register_step_pre_hook(self._before_step)

    def forget(self) -> None:
        """Record that gradients are not agreed steps, and restore the center."""
        self._passes.agreed = None
        self._is_due = False
        if self._local is not None:
            self._local.restore()

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the context, set the parameters to the model that is the same on all ranks."""
        return nullcontext() if self._local is None else self._local.evaluating()

    def loaded(self) -> None:
        """Let forward passes include the residual that was loaded."""
        self._has_residual, self._lacks_residual = True, False
        if self._local is not None:
            self._local.find_models()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = None
        # Call it here: when the optimizer would call it, gradients are already hidden.
        if closure is not None:
            self._in_closure = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._in_closure = False
        self._skips.drop(optimizer)
        stepped = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        if self._passes.agreed is None and self.groups.create_states():
            self._hide(stepped)
            return None
        for parameter, _ in stepped:
            # Check all parameters before the first one changes, so that an error leaves the model
            # intact.
            self._require_agreed(parameter)
        if self._lacks_residual:
            self._lacks_residual = False
            warn_of_lost_residual(self.peers.world.rank, self._optimizer)
        # Only a fused optimizer has it: a GradScaler leaves the unscaling to the optimizer.
        if stepped and (scale := getattr(optimizer, "grad_scale", None)) is not None:
            torch._foreach_div_([gradient for _, gradient in stepped], float(scale))
        apply_agreed_steps(optimizer, agreed=None)
        self._is_due = False
        self._hide(stepped)
        if self._local is not None:
            self._local.restore()
            self._local.end_step()
        # The optimizer must return its closure's loss: pass one that does not run backward again.
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _hide(self, stepped: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Remove the gradients until `_after_step`, so that the optimizer itself finds none."""
        self._hidden = stepped
        for parameter, _ in stepped:
            parameter.grad = None

    def _after_step(self, *call: Any) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def _require_agreed(self, parameter: torch.nn.Parameter) -> None:
        """Raise ValueError unless the gradient is an agreed step that has not been applied yet."""
        agreed = self._passes.agreed
        if agreed is not None and self._is_due and agreed.is_in(parameter):
            if not agreed.is_changed(parameter):
                return
            raise ValueError(
                f"rank {self.peers.world.rank}: gradients were changed between backward() and "
                "step(), but there they hold the agreed steps of AdamW: leave out "
                f"clip_grad_norm_ (or a trainer's option for it). {self._clipping}; "
                "last_step.gradient_norm is the norm, where only that is wanted; "
                "with adam_steps='after' the optimizer steps with agreed gradients"
            )
        raise ValueError(
            f"rank {self.peers.world.rank}: step() applies the agreed steps of AdamW, but a "
            f"parameter of shape {list(parameter.shape)} has another gradient. It may come from a "
            "pass within no_sync() after the one that was exchanged, from a step() before this "
            "one, from another model, from a call of model.module, or from a layer thawed after "
            "the model was wrapped. Let the last pass before step() be exchanged, and wrap the "
            "model again after thawing a layer; with adam_steps='after' the optimizer steps with "
            "any gradients"
        )

    def _before_load(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        self.forget()
        self._loading = state_dict

    def _after_load(self, optimizer: Any) -> None:
        # torch casts loaded state to the parameters' dtype.
        keep_precision(optimizer, self._loading)
        self._loading = {}
        self._check_missing_residual()

    def _check_missing_residual(self) -> None:
        """Record whether the optimizer's state is from steps with a residual that is missing."""
        steps = (state for state in self._optimizer.state.values() if SHARED in state)
        # A single rank has no residual to lose: it steps as its optimizer would.
        may_lack = len(self.peers.ranks) > 1 and not self._has_residual
        self._lacks_residual = may_lack and any(state.get(STEP, 0) > 0 for state in steps)


def check_clip_norm(norm: float | None, *, makes_adam_steps: bool) -> None:
    """Raise TypeError for a global_clip_norm that is not a number, ValueError if unusable."""
    if norm is None:
        return
    check_number("global_clip_norm", norm)
    if not norm > 0:
        raise ValueError(f"global_clip_norm must be above 0, got {norm}")
    if not makes_adam_steps:
        raise ValueError(
            "global_clip_norm is for an Adam or AdamW whose steps the hook computes (optimizer=): "
            "with any other optimizer use clip_grad_norm_ after backward, which clips the agreed "
            "gradients"
        )
