"""The optimizers of a hook's model, which hear of its passes only by what is in their gradients.

HookSkips: drops the gradients of passes that do not count. OptimizerChecks: examines an optimizer
when it first steps. PassWatch: raises where a pass adds its gradients to agreed steps.

A hook need not be given an optimizer. So an optimizer whose momentum would be taken twice is an
error in its first step, as is any other than the one whose steps the hook makes.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..compression import ErrorFeedback
from ..errors import check_count, page
from ..exchange.buckets.parameters import parameters_of
from ..optim.gradient_checks import CorrectedGradients, log_advice, require_one_momentum
from ..optim.options import warn_of_few_entries
from ..optim.step_checks import SkippedSteps
from ..optim.wrapped.adam_step import AgreedSteps, groups_to_step_before, require_plain

_everyones: Final[WeakSet[HookSkips]] = WeakSet()

_log = logging.getLogger("gtopk")

Residuals = Callable[[], Iterable[tuple[torch.nn.Parameter, torch.Tensor]]]


class HookSkips(SkippedSteps):
    """Notes whether passes count, for one model whose gradients a hook exchanges.

    An optimizer may step several models: agreed gradients of those with a hook of their own were
    sent for good, and stay. Others are dropped with this model's: they may come of the same loss.
    parameters: returns the model's parameters.
    max_skipped_steps: how many passes in a row may not count.
    count: how many passes did not count; counted: whether the last one does.
    is_due: the last pass counts, and no optimizer has stepped since.
    is_loaded: whether a state was loaded.
    """

    def __init__(
        self, parameters: Callable[[], Collection[torch.Tensor]], max_skipped_steps: int
    ) -> None:
        check_count("max_skipped_steps", max_skipped_steps)
        super().__init__(max_skipped_steps)
        self.parameters = parameters
        self.counted = True  # the last pass
        self.is_due = self.is_loaded = self._has_warned = False
        self._dropped: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        _everyones.add(self)

    def note_pass(self, counted: bool, rank: int, step: int, where: str) -> None:
        """Note whether a pass that has ended counts; warn of one that does not.

        where: the ranks whose gradients are not finite; "": only the sum is not.
        Raises FloatingPointError where more passes in a row did not count than allowed.
        """
        self.counted = self.is_due = counted
        if counted:
            self.end_row()
        else:
            self.note(rank, step, where)

    def note_loaded(self) -> None:
        """Note that a state was loaded: a new row begins."""
        self.is_due, self.is_loaded = False, True
        self.end_row()

    def warn_of_saving(self, rank: int) -> None:
        """Warn, once, where a state is saved between a pass and the step that applies it."""
        if self.is_due and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rank %d: the hook's state is saved between backward() and step(): what the pass "
                "has sent is in the gradients alone, neither in the residual nor in the "
                "parameters, and a run that is resumed from it lacks it. Save after step()",
                rank,
            )

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients, once, where the last pass does not count.

        Gradients of other models with a hook of gtopk stay: they hold what was sent for them.
        """
        # Once for each pass: gradients that the script has put there since are not of that pass.
        if self.counted or self._dropped.get(optimizer) == self.count:
            return
        self._dropped[optimizer] = self.count
        others = set[torch.Tensor]().union(*(each.parameters() for each in _everyones))
        kept = others.difference(self.parameters())
        for parameter in parameters_of(optimizer):
            if parameter not in kept:
                parameter.grad = None


# Replaced as a whole, so that a step may iterate while another thread adds one. PyTorch iterates
# over its global hooks: removing ours when a communication hook is collected would break a step.
_living: tuple[weakref.ref[OptimizerChecks], ...] = ()
_adding = threading.Lock()


def _check_all(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let all living hooks check an optimizer that is about to step.

    args: the optimizer itself, and what else `step` was called with. Returned with a closure that
    drops the gradients of its own backward pass where that does not count.
    """
    living = [checks for each in _living if (checks := each()) is not None]
    for checks in living:
        checks.check(optimizer)
    closure = kwargs["closure"] if "closure" in kwargs else next(iter(args[1:]), None)
    mine = [checks for checks in living if checks.has_seen(optimizer)]
    if closure is None or not mine:
        return None

    def dropping() -> Any:
        loss = closure()
        for checks in mine:
            checks.drop(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": dropping}
    return (args[0], dropping, *args[2:]), kwargs


def _note_step(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Let all living hooks know that an optimizer has stepped their models."""
    for checks in filter(None, (each() for each in _living)):
        checks.note_step(optimizer)


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
        "this rank had not sent is lost%s. Save the state_dict of the hook's state on every rank, "
        "and give it to load_state_dict (%s)",
        rank,
        type(optimizer).__name__,
        "" if norm is None else f" (a norm of {norm:.3g} on the rank that saved)",
        page("Checkpoints"),
    )


class ResidualNote:
    """The residual's norm in the groups of an optimizer's saved state.

    By it a run that goes on without the hook's state is known, where the optimizer itself has no
    state, as SGD. Live groups have none, but from loading on until `take`.
    The norm is the key of an empty dict. DCP passes over empty ones, so that a state with the note
    takes what a state without one has saved: dcp.load demands every value of the state it fills.
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
            group[self._KEY] = {norm: {}}

    @classmethod
    def take(cls, optimizer: torch.optim.Optimizer) -> float | None:
        """Remove it from an optimizer whose state was loaded, and return it; None: it has none."""
        notes = (group.pop(cls._KEY, {}) for group in optimizer.param_groups)
        return max((norm for note in notes for norm in note), default=None)


class OptimizerChecks:
    """Checks each optimizer of a hook's model once, at its first step, as long as this lives.

    Before every step, and in its closure, it drops the gradients of a pass that does not count.

    rank: in the world. says: also log what had better be done before the selection, and whether
        the density is too low.
    way: how to let the hook make an Adam's steps, in words.
    stepped: the optimizer whose steps the hook makes; any other one is a ValueError.
    adam: as of `CorrectedGradients`.
    residuals: as of `ResidualNote`, to tell where the hook's state is not loaded with an
        optimizer's; None: the optimizer's own state tells.
    retire: a method, held weakly, called when another hook has taken the model over.
    corrected: the gradients that a correction has made steps of, to refuse clipping in every step:
        the hook calls its `agree` after each pass.
    """

    def __init__(
        self,
        skips: HookSkips,
        compression: ErrorFeedback,
        rank: int,
        *,
        says: bool,
        way: str,
        stepped: torch.optim.Optimizer | None = None,
        adam: str = "",
        residuals: Residuals | None = None,
        retire: Callable[[], None] | None = None,
    ) -> None:
        global _living
        self.corrected = CorrectedGradients(compression, adam)
        self._skips, self._compression, self._rank = skips, compression, rank
        self._says, self._way, self._stepped = says, way, stepped
        self._seen = WeakSet[torch.optim.Optimizer]()
        # Not "nothing in `_seen`": an optimizer that another replaces leaves it.
        self._has_warned = self._has_stepped = False
        self._note = None if residuals is None else ResidualNote(residuals)
        self._retire = None if retire is None else weakref.WeakMethod(retire)
        self._is_retired = False
        with _adding:
            if not _living:
                register_optimizer_step_pre_hook(_check_all)
                register_optimizer_step_post_hook(_note_step)
            _living = (*(each for each in _living if each() is not None), weakref.ref(self))

    def take_over(self) -> None:
        """Retire the hooks all of whose parameters this one's pass has: their phase is over.

        Torch's DDP and an optimizer with hooks live on in circles until the collector comes.
        Raises ValueError where this hook is retired, and the steps that it makes have no taker.
        """
        others = [each for each in (each() for each in _living) if each not in (None, self)]
        if self._is_retired and self._stepped is not None:
            raise ValueError(
                f"rank {self._rank}: another hook has exchanged the gradients of this one's model "
                "since, and this one makes no steps any more: wrap the model anew, and register "
                "the hook with a new state"
            )
        self._is_retired = False
        mine = self._skips.parameters() if others else ()
        for other in filter(None, others):
            theirs = other._skips.parameters()
            if not other._is_retired and theirs and all(each in mine for each in theirs):
                other._is_retired = True
                if other._retire is not None and (retire := other._retire()) is not None:
                    retire()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step, if it is one of the model."""
        if self._is_retired:
            return
        if optimizer in self._seen:
            ResidualNote.take(optimizer)
        else:
            parameters = self._skips.parameters()
            if not any(p in parameters for p in parameters_of(optimizer)):
                return
            if self._stepped is not None and optimizer is not self._stepped:
                # A container of optimizers calls the step of the one inside, which is checked then.
                if _holds(optimizer, self._stepped):
                    return
                raise ValueError(
                    f"rank {self._rank}: the hook was given an optimizer whose steps it makes, and "
                    f"another {type(optimizer).__name__} steps its model: give the hook this one, "
                    "or adam_steps='after'"
                )
            if self._says and not self._has_warned:
                self._has_warned = True
                trained = sum(p.numel() for p in parameters if p.requires_grad)
                warn_of_few_entries(self._compression, trained)
            # Before the optimizer counts as seen: a script that catches the error and goes on gets
            # it again in the next step.
            if self._stepped is None:
                require_one_momentum(optimizer, self._compression)
                require_plain(optimizer.state.values(), self._rank)
                if self._says:
                    takes = groups_to_step_before(optimizer, self._compression) is not None
                    log_advice(optimizer, self._compression, self._way if takes else "")
            if self._note is not None:
                norm = self._note.take(optimizer)
                if norm is not None and not (self._has_stepped or self._skips.is_loaded):
                    warn_of_lost_residual(self._rank, optimizer, norm)
                self._note.add_to_saved(optimizer)
            self._has_stepped = True
            self._seen.add(optimizer)
        # Here, and not by a hook of each optimizer, which a script may forget: a NaN would stay in
        # the parameters. A GradScaler has seen it by now.
        self.drop(optimizer)
        self.corrected.require_unchanged(optimizer)

    def has_seen(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer has been checked: it is one of the model."""
        return optimizer in self._seen

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients where the last pass does not count."""
        self._skips.drop(optimizer)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped: a model that it has stepped may be saved."""
        if optimizer in self._seen:
            self._skips.is_due = False


class PassWatch:
    """Raises where a backward pass adds its gradients to agreed steps, which are no gradients.

    made_by: who made the steps of gradients; "": gradients remain gradients, which may be added up.
    accumulating: how to add up passes, for the error.
    """

    def __init__(self, rank: int, made_by: str, accumulating: str) -> None:
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
        # Only the first bucket's tell: other parameters get their gradients later in this pass.
        if not self._added.isdisjoint(parameters):
            self._added.clear()
            raise self._error()
        for parameter in parameters:
            if parameter not in self._watched and parameter.requires_grad:
                self._watched[parameter] = parameter.register_hook(
                    partial(self._track_gradient, parameter)
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

    def _track_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note, before a pass adds to a gradient, whether it is still an agreed step."""
        if self.agreed is None or not self.agreed.is_in(parameter):
            self._added.discard(parameter)
        elif not self.agreed.is_changed(parameter):
            self._added.add(parameter)
