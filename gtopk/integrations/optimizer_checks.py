"""The optimizers of a hook's model, which learn of its passes only through their gradients.

HookSkips: drops the gradients of passes that do not count. OptimizerChecks: checks an optimizer
in its first step. PassWatch: raises if a pass adds its gradients to agreed steps.

A hook need not be given an optimizer. So doubled momentum raises in the optimizer's first step, and
so does any optimizer other than the one that the hook computes the steps of.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from ..compression import ErrorFeedback
from ..errors import check_count, page
from ..exchange.buckets.parameters import parameters_of
from ..exchange.residual_state import plain_name
from ..optim.gradient_checks import CorrectedGradients, ddps_of, log_advice, require_one_momentum
from ..optim.options import warn_of_few_entries
from ..optim.step_checks import SkippedSteps
from ..optim.wrapped.adam_step import AgreedSteps, groups_to_step_before, require_plain
from ..optim.wrapped.wrapping import Wrapping
from ..units import counted
from .passes import has_hook, in_other_ddp

_all_skips: Final[WeakSet[HookSkips]] = WeakSet()

_log = logging.getLogger("gtopk")

Residuals = Callable[[], Iterable[tuple[torch.nn.Parameter, torch.Tensor]]]


class HookSkips(SkippedSteps):
    """Track whether passes count, for one model with a hook that exchanges its gradients.

    An optimizer may step several models. Agreed gradients of models with their own hook are kept,
    because they cannot be sent again. Gradients of other models are dropped with this model's,
    because they may come from the same loss.
    parameters: returns the model's parameters.
    max_skipped_steps: how many passes in a row may not count.
    passes: how many there were; count: how many did not count; counted: whether the last one does.
    is_due: the last pass counts, and no optimizer has stepped since.
    is_loaded: whether a state was loaded.
    """

    def __init__(
        self, parameters: Callable[[], Collection[torch.Tensor]], max_skipped_steps: int
    ) -> None:
        check_count("max_skipped_steps", max_skipped_steps)
        super().__init__(max_skipped_steps)
        self.parameters = parameters
        self.passes = 0
        self.counted = True  # whether the last pass counts
        self.is_due = self.is_loaded = self._has_warned = False
        self._dropped: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        _all_skips.add(self)

    def note_pass(self, counted: bool, rank: int, step: int, where: str) -> None:
        """Record whether a pass that has ended counts; warn if it does not.

        where: the ranks with non-finite gradients; "": only the sum is not finite.
        Raises FloatingPointError if more passes in a row did not count than allowed.
        """
        self.passes += 1
        self.counted = self.is_due = counted
        if counted:
            self.end_row()
        else:
            self.note(rank, step, where)

    def note_loaded(self) -> None:
        """Record that a state was loaded: a new row begins."""
        self.is_due, self.is_loaded = False, True
        self.end_row()

    def warn_of_saving(self, rank: int) -> None:
        """Warn, once, if a state is saved between a pass and the step that applies it."""
        if self.is_due and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rank %d: the hook's state is saved between backward() and step(): what the pass "
                "has sent is only in the gradients, not in the residual or the parameters, so a "
                "run that resumes from this state loses it. Save after step()",
                rank,
            )

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients, once, if the last pass does not count.

        Gradients of other models with a gtopk hook are kept: they hold what was sent for them.
        """
        # Once per pass: gradients that the script has set since then are not of that pass.
        if self.counted or self._dropped.get(optimizer) == self.count:
            return
        self._dropped[optimizer] = self.count
        others = set[torch.Tensor]().union(*(each.parameters() for each in _all_skips))
        kept = others.difference(self.parameters())
        for parameter in parameters_of(optimizer):
            if parameter not in kept:
                parameter.grad = None


# Always replaced, never changed, so that a step may iterate while another thread adds one. PyTorch
# iterates over its global hooks, so removing ours when a hook is collected would break a step.
_instances: tuple[weakref.ref[OptimizerChecks], ...] = ()
_instances_lock = threading.Lock()


def _check_all(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let all living hooks check an optimizer that is about to step.

    args: the optimizer itself, and the other arguments of `step`. Returns them with a closure that
    also checks the optimizer after its own backward pass.
    """
    instances = [checks for each in _instances if (checks := each()) is not None]
    closure = kwargs["closure"] if "closure" in kwargs else next(iter(args[1:]), None)
    for checks in instances:
        # Otherwise only after the closure, whose pass may be the first of a new hook: that retires
        # an earlier phase's hook, which would refuse the new optimizer.
        if closure is None or optimizer in checks.checked:
            checks.check(optimizer)
        if closure is None:
            checks.require_exchanged(optimizer)
    if closure is None:
        return None

    def closure_and_check() -> Any:
        loss = closure()
        for checks in instances:
            checks.check(optimizer)
            checks.require_exchanged(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_check}
    return (args[0], closure_and_check, *args[2:]), kwargs


def _note_step(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Tell all living hooks that an optimizer has stepped their models."""
    for checks in filter(None, (each() for each in _instances)):
        checks.note_step(optimizer)


def _contains(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer contains another, as torchtitan's OptimizersContainer does."""
    values = vars(optimizer).values()
    lists = (each for value in values if isinstance(value, list | tuple) for each in value)
    return any(each is inner for each in (*values, *lists))


def warn_of_lost_residual(
    rank: int, optimizer: torch.optim.Optimizer, norm: float | None = None
) -> None:
    """Warn that an optimizer continues from earlier steps without the state of the earlier hook.

    norm: of the saved residual, if known.
    """
    _log.warning(
        "rank %d: %s goes on from earlier steps, and the state of the hook was not loaded: what "
        "this rank had not sent is lost%s. Save the state_dict of the hook's state on every rank, "
        "and load it with load_state_dict (%s)",
        rank,
        type(optimizer).__name__,
        "" if norm is None else f" (a norm of {norm:.3g} on the rank that saved)",
        page("Checkpoints"),
    )


class ResidualNote:
    """The residual's norm, stored in the groups of an optimizer's saved state.

    It reveals that a run resumes without the hook's state, if the optimizer itself has no state,
    like SGD. Live groups only have it from loading until `take`.
    The norm is stored as the key of an empty dict. DCP skips empty dicts, so a state with the note
    can load from one saved without it: dcp.load requires every value of the state that it fills.
    residuals: a method of the hook's bucket exchanges, to which this refers weakly.
    """

    _KEY: Final = "gtopk_residual_norm"

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = weakref.WeakMethod(residuals)

    def add_to_saved(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the norm to every `state_dict` of this optimizer from now on."""
        optimizer.register_state_dict_post_hook(self._add)

    def _add(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if (residuals := self._residuals()) is None:
            return
        norm = math.hypot(*(float(part.norm()) for _, part in residuals()))
        for group in state_dict["param_groups"] if norm else ():
            group[self._KEY] = {norm: {}}

    @classmethod
    def take(cls, optimizer: torch.optim.Optimizer) -> float | None:
        """Remove the norm from an optimizer after loading, and return it; None if it has none."""
        notes = (group.pop(cls._KEY, {}) for group in optimizer.param_groups)
        return max((norm for note in notes for norm in note), default=None)


class OptimizerChecks:
    """Check each optimizer of a hook's model once, in its first step, while this object lives.

    Before every step, and in its closure, also drop the gradients of a pass that does not count.

    rank: in the world. ranks: those that exchange gradients.
    logs_advice: also log advice on steps before the selection, and whether the density is too low.
    hint: how to let the hook compute Adam's steps, for messages.
    stepped: the optimizer that the hook computes the steps of; any other one is a ValueError.
    adam: see `CorrectedGradients`.
    residuals: see `ResidualNote`; detects that the hook's state is not loaded with the
        optimizer's. None: the optimizer's own state shows it.
    retire: a method, referred to weakly, called when another hook has taken over the model.
    is_retired: whether another hook, or other code, has the model.
    ignored: parameters of the model whose gradients the script averages itself.
    checked: the optimizers that it has checked, which belong to the model, each with the number of
        the model's passes by its last step.
    corrected: the gradients that a correction turned into steps, to refuse clipping in every step:
        the hook calls its `agree` after each pass.
    """

    def __init__(
        self,
        skips: HookSkips,
        compression: ErrorFeedback,
        rank: int,
        *,
        ranks: Sequence[int] = (),
        logs_advice: bool,
        hint: str,
        stepped: torch.optim.Optimizer | None = None,
        adam: str = "",
        residuals: Residuals | None = None,
        retire: Callable[[], None] | None = None,
    ) -> None:
        global _instances
        self.corrected = CorrectedGradients(compression, adam)
        self._skips, self._compression, self._rank, self._ranks = skips, compression, rank, ranks
        self._logs_advice, self._hint, self._stepped = logs_advice, hint, stepped
        self.checked = WeakKeyDictionary[torch.optim.Optimizer, int]()
        # Optimizers that stepped before the first pass.
        self._waiting = WeakSet[torch.optim.Optimizer]()
        # Parameters outside the model, searched for once, as that takes a tenth of a second.
        self._foreign = WeakTensorKeyDictionary()
        self.ignored: Collection[torch.Tensor] = ()
        # Not derived from `checked`, because a replaced optimizer disappears from it.
        self._has_warned = self._has_searched_own = self._has_stepped = False
        self._note = None if residuals is None else ResidualNote(residuals)
        self._retire = None if retire is None else weakref.WeakMethod(retire)
        self.is_retired = False
        with _instances_lock:
            if not _instances:
                register_optimizer_step_pre_hook(_check_all)
                register_optimizer_step_post_hook(_note_step)
            _instances = (*(each for each in _instances if each() is not None), weakref.ref(self))

    def take_over(self) -> None:
        """Retire all hooks whose parameters are all in this one's pass: their phase is over.

        DDP and an optimizer with hooks stay alive in reference cycles until garbage collection.
        Raises ValueError if this hook is retired and should compute steps, which nothing applies.
        """
        others = [each for each in (each() for each in _instances) if each not in (None, self)]
        if self.is_retired and self._stepped is not None:
            raise ValueError(
                f"rank {self._rank}: another hook has taken over the model, so this one no longer "
                "computes its steps: wrap the model again, and register the hook with a new state"
            )
        self.is_retired = False
        own = self._skips.parameters() if others else ()
        for other in filter(None, others):
            replaced = other._skips.parameters()
            if not other.is_retired and replaced and all(each in own for each in replaced):
                other.is_retired = True
                if other._retire is not None and (retire := other._retire()) is not None:
                    retire()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step, if it belongs to the model."""
        if self.is_retired:
            return
        if optimizer in self.checked:
            ResidualNote.take(optimizer)
        else:
            parameters = self._skips.parameters()
            if not any(p in parameters for p in parameters_of(optimizer)):
                if any(p in self.ignored for p in parameters_of(optimizer)):
                    self._skips.drop(optimizer)
                return
            if self._stepped is not None and optimizer is not self._stepped:
                # A container calls the inner optimizer's step, which is then checked.
                if _contains(optimizer, self._stepped):
                    return
                raise ValueError(
                    f"rank {self._rank}: the hook computes the steps of one optimizer, but another "
                    f"{type(optimizer).__name__} steps its model: pass this one to the hook, or "
                    "adam_steps='after'"
                )
            if self._logs_advice and not self._has_warned:
                self._has_warned = True
                trained = sum(p.numel() for p in parameters if p.requires_grad)
                warn_of_few_entries(self._compression, trained)
            # Before `checked` has the optimizer, so that a script that catches the error gets it
            # again in the next step.
            if self._stepped is None:
                require_one_momentum(optimizer, self._compression)
                require_plain(optimizer.state.values(), self._rank)
                if self._logs_advice:
                    can_select = groups_to_step_before(optimizer, self._compression) is not None
                    hint = self._hint if can_select else ""
                    unstepped = {*parameters}.difference(parameters_of(optimizer))
                    if hint and any(p.requires_grad for p in unstepped):
                        hint = f"let one optimizer, in groups, step all parameters, and {hint}"
                    log_advice(optimizer, self._compression, hint)
            if self._note is not None:
                norm = self._note.take(optimizer)
                if norm is not None and not (self._has_stepped or self._skips.is_loaded):
                    warn_of_lost_residual(self._rank, optimizer, norm)
                self._note.add_to_saved(optimizer)
            self._has_stepped = True
            self.checked[optimizer] = -1
        # Here, and not in a hook of each optimizer, which a script may forget: a NaN would stay in
        # the parameters. A GradScaler has already seen it.
        self._skips.drop(optimizer)
        self.corrected.require_unchanged(optimizer)

    def require_exchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for a gradient of the model that the hook cannot get.

        Warn, once, of gradients that it did not get, and of parameters outside the model.
        """
        # If the hook makes the steps, it checks each gradient (`HookedAdam`); ours exchange.
        exchanges = self._stepped is not None or isinstance(optimizer, Wrapping)
        is_checked = optimizer in self.checked or not self._skips.passes
        if len(self._ranks) < 2 or exchanges or self.is_retired or not is_checked:
            return
        own = self._skips.parameters()
        listed = [p for p in parameters_of(optimizer) if p.requires_grad and p.grad is not None]
        is_exchanged = self.checked.get(optimizer, 0) != self._skips.passes
        # By id, as nearly all steps end here: hashing a tensor calls Python code.
        if is_exchanged and {*map(id, own)}.issuperset(map(id, listed)):
            return
        stepped: set[torch.Tensor] = {*listed}
        if not is_exchanged:
            if not self._has_searched_own and self._are_own(stepped, own, optimizer):
                self._has_searched_own = True
                _log.warning(
                    "rank %d: %s steps with this rank's own gradients, as the hook did not get "
                    "those of the last pass (within no_sync(), or of a call of model.module): "
                    "replicas will differ, unless the script averages them",
                    self._rank,
                    type(optimizer).__name__,
                )
            return
        known = (skips.parameters() for skips in _all_skips)
        outside = stepped.difference(self.ignored, *known)
        found = {p for p in outside if p not in self._foreign and not self._is_sharded(p)}
        new = found - in_other_ddp(found)
        for ddp in ddps_of(own) if new else ():
            for name, parameter in ddp["_modules"]["module"].named_parameters():
                if parameter in new and name in ddp["parameters_to_ignore"]:
                    new.remove(parameter)  # the script has told DDP to leave it out
                elif parameter in new:
                    raise ValueError(
                        f"rank {self._rank}: the gradient of '{plain_name(name)}' is not "
                        "exchanged: when DistributedDataParallel wrapped the model, this parameter "
                        "was frozen or not in it. Wrap the model again, with a new state of the "
                        "hook, after thawing or adding layers; or freeze them only after wrapping, "
                        "with find_unused_parameters=True"
                    )
        self._foreign.update(dict.fromkeys(found, True))
        if foreign := [p for p in parameters_of(optimizer) if p in new]:
            _log.warning(
                "rank %d: %s steps %s outside the hook's model, the first of shape %s: these "
                "gradients are not exchanged, so replicas will differ, unless the script does that",
                self._rank,
                type(optimizer).__name__,
                counted(len(foreign), "parameter"),
                list(foreign[0].shape),
            )

    def _are_own(
        self, stepped: set[torch.Tensor], own: Collection[torch.Tensor], optimizer: Any
    ) -> bool:
        """Return whether any of these gradients should have come from a pass of this hook."""
        # DCP steps with rates of zero, only to create an optimizer's state.
        if not any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
            return False
        if self._skips.passes:
            mine = stepped.intersection(own)
            self._has_searched_own = bool(mine)
            return not mine.issubset(in_other_ddp(mine))
        if optimizer in self._waiting:
            return False
        # The hook has never been called: its model shows only in DDP.
        self._waiting.add(optimizer)
        others = (skips.parameters() for skips in _all_skips)
        return any(map(has_hook, ddps_of(stepped.difference(*others))))

    def _is_sharded(self, parameter: Any) -> bool:
        """Return whether FSDP exchanges a parameter's gradient among all these ranks."""
        if not hasattr(parameter, "to_local"):
            return False
        return set(self._ranks).issubset(parameter.device_mesh.mesh.flatten().tolist())

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped, so that its model may be saved."""
        if optimizer in self.checked:
            self._skips.is_due = False
            self.checked[optimizer] = self._skips.passes


class PassWatch:
    """Raise if a backward pass adds its gradients to agreed steps, which are not gradients.

    made_by: what turned gradients into steps; "": they remain gradients, which may be accumulated.
    accumulating: how to accumulate passes, for the error.
    """

    def __init__(self, rank: int, made_by: str, accumulating: str) -> None:
        self.agreed: AgreedSteps | None = None  # of the last pass
        self._rank, self._made_by, self.accumulating = rank, made_by, accumulating
        self._watched: dict[torch.Tensor, Any] = {}
        self._added: set[torch.Tensor] = set()  # parameters with gradients added to agreed steps

    def note(self, parameters: Iterable[torch.Tensor] | None) -> None:
        """Record that a pass has ended.

        parameters: those with agreed steps as gradients now; None: the pass does not count.
        """
        is_agreed = self._made_by and parameters is not None
        self.agreed = AgreedSteps(parameters or ()) if is_agreed else None

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError if this pass has added gradients to agreed steps.

        parameters: of the first bucket of a pass; they are checked from the next pass on. A pass
            that is not exchanged may add to agreed steps, as in a GAN.
        """
        parameters = list(parameters) if self._made_by else []
        # Check only the first bucket: other parameters get their gradients later in this pass.
        if not self._added.isdisjoint(parameters):
            self._added.clear()
            raise self._error()
        for parameter in parameters:
            if parameter not in self._watched and parameter.requires_grad:
                self._watched[parameter] = parameter.register_hook(
                    partial(self._track_gradient, parameter)
                )

    def require_cleared(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError if gradients of these parameters would be added to agreed steps.

        Use it instead of `watch` in a hook that runs before gradients are added.
        """
        agreed = self.agreed
        if agreed is None:
            return
        if any(agreed.is_in(each) and not agreed.is_changed(each) for each in parameters):
            raise self._error()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._watched.values():
            handle.remove()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"rank {self._rank}: a backward pass has added its gradients to the agreed steps of "
            f"{self._made_by}, which the previous pass left in p.grad: run all passes of a step "
            f"but the last {self.accumulating}, and clear gradients (optimizer.zero_grad()) after "
            "step(). Run a pass whose gradients are thrown away, as the discriminator's in a "
            f"generator's step, {self.accumulating}, too: if it is exchanged, no step applies "
            f"what it takes from the residual ({page('Several models, and GANs')})"
        )

    def _track_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Before a pass adds to a gradient, record whether it is still an agreed step."""
        if self.agreed is None or not self.agreed.is_in(parameter):
            self._added.discard(parameter)
        elif not self.agreed.is_changed(parameter):
            self._added.add(parameter)
