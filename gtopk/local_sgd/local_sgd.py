"""LocalSGD: ranks step by themselves, and combine their changes at intervals (DiLoCo).

    rank 0    z  x x x x |      | z'  x x x x |      | z"    x: a step of the wrapped optimizer
    rank 1    z  x x x x | wire | z'  x x x x | wire | z"    z: the same bits on every rank

    a_i = e_i + w_i (z - x_i)     w_i: this rank's share of all ranks' steps in the round
    s_i = T(a_i)                  S, r_i = reduce(s_i)
    e_i = a_i - s_i + r_i         z' = the outer optimizer's step from z, with S for its gradient

Conserved: S + sum e_i(new) = sum e_i(old) + sum w_i (z - x_i). With rounds of one step, all entries
sent, and plain descent of rate 1 as the outer optimizer, z' is the mean of the ranks' models. Dense
with Nesterov momentum outside it is DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

With overlap_steps a rank continues while changes are exchanged, as in Streaming DiLoCo (Douillard
et al. 2025, arXiv 2501.18512). Then it moves by z' - x_i, and keeps its own steps:

    rank 0    z  x x x x y y x x y y x x      y: a step while the engine's thread exchanges z - x_i
    wire                 ---     ---

With fragments each part of the model has its own rounds, which end in turn (fragments.py). With
residual_decay d, e_i is multiplied by d in a_i: SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706).
The conservation then leaks: S + sum e_i(new) = d sum e_i(old) + sum w_i (z - x_i).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import torch

from ..compression import Compressing, Compression, ErrorFeedback
from ..errors import HorovodInternalError, check_count
from ..exchange.automatic import hides_behind_backward
from ..exchange.bucket_exchange import require_compression
from ..exchange.buckets.parameters import name_parameters, refuse_new_parameters, require_trained
from ..optim.gradient_checks import make_outer, require_one_momentum, set_aside_optimizers_of
from ..optim.wrapped import checkpoint as optimizer_checkpoint
from ..optim.wrapped.tree import lay_out_as_parameters
from ..optim.wrapped.wrapping import Wrapping, wrap
from ..runtime.logs import EVERYWHERE
from ..runtime.world import world
from ..runtime.world.process_sets import ProcessSet, global_process_set, require_process_set
from ..telemetry.step_report import StepReport
from ..units import counted
from .fragments import Fragment, Fragments, check_rounds
from .outer_exchange import LostReplicas, options_of, state_of

__all__ = ["LocalSGD", "averaging", "nesterov"]

_log = logging.getLogger("gtopk")
_KEY: Final = "local_sgd"
_FORMAT: Final = 1

# Makes the outer optimizer for these parameters: the model's own, which hold z when it steps.
Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def nesterov(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: rate 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def averaging(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain descent of rate 1: if dense, z' is the mean of the models."""
    return torch.optim.SGD(parameters, lr=1.0)


class _LocalSGD(Wrapping):
    """The result of `LocalSGD`: a mixin that `wrap` combines with the user's optimizer class.

    outer:         the outer optimizer; a scheduler may set its rate, the same on all ranks.
    inner_steps:   steps of a round, at least; None: `outer_step` ends rounds. May be set, to the
                   same value on all ranks.
    overlap_steps: steps made while changes are exchanged.
    steps_made:    by this rank, in this round; with fragments in the longest open round.
    outer_steps:   so far, with skipped ones; with fragments the exchange of each counts.
    skipped_steps: outer steps that changed nothing.
    lost_replicas: how often a rank's replica was not finite and was replaced with the others'.
    last_step:     the report of the last outer step; None before the first.
    """

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        inner_steps: int | None,
        outer: Outer,
        compression: Any,
        overlap_steps: int,
        fragments: int,
        residual_decay: float,
        process_set: ProcessSet,
        max_skipped_steps: int,
    ) -> None:
        self.inner_steps = inner_steps
        self.overlap_steps = overlap_steps
        self._residual_decay = residual_decay
        self.process_set = process_set
        names = name_parameters(self, named_parameters)
        self._names = {p: names[p] for p in require_trained(names)}
        self.outer = make_outer(outer, self._names)
        set_aside_optimizers_of(self._names)
        if isinstance(compression, ErrorFeedback):
            # momentum_correction is a momentum already; with the outer optimizer's, too, a change
            # would get both.
            require_one_momentum(self.outer, compression, outer=True)
        self.outer_steps = self.skipped_steps = 0
        self.last_step: StepReport | None = None
        self._lost = LostReplicas(max_skipped_steps)
        self._good_steps = 0  # outer steps since the last one with a lost replica or an overflow
        self._world = here = world.current()
        self._fragments = Fragments(
            self._names, fragments, compression, process_set, here, residual_decay
        )
        self._fragments.start_rounds(inner_steps)
        self._models_compared = False  # and found to be the same
        self._ended = time.perf_counter()

    @property
    def steps_made(self) -> int:
        """How many steps this rank has made in this round; with fragments, in the longest one."""
        return max(fragment.steps_made for fragment in self._fragments)

    @property
    def lost_replicas(self) -> int:
        """How often a rank's replica was not finite and was replaced with the others'."""
        return self._lost.count

    @property
    def diverging_parameters(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters whose values differ between ranks now: those within a round."""
        return [p for each in self._fragments if each.center for p in each.parameters]

    def outer_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.outer]

    def shared_layout(self) -> list[str]:
        return self._fragments.layout()

    def load_shared_state(self, common: dict[str, Any]) -> None:
        """Adopt another rank's place in its round; broadcast_parameters brings its replica."""
        self._receive()  # it changes this rank's residual, as on the other ranks
        for fragment in self._fragments:
            if fragment.previous is not None and (outcome := fragment.previous.outcome) is not None:
                self._world.note_preempted(outcome.preempted)
        self._lost.end_row()
        self.outer_steps = self._fragments.load(common)
        self._models_compared = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's replica with its own gradients; end the round when it is due.

        closure: called once, before the step, to compute the loss and the gradients.
        """
        # Before the closure and the step: the center is the model that all ranks start from.
        self._begin_round()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_wrapped()
        self._world.step += 1
        self._fragments.space(self.inner_steps)
        # All count first: a move may reset other fragments to their centers, which drops this step.
        for fragment in self._fragments:
            fragment.steps_made += 1
        for fragment in self._fragments:
            # Not earlier, even if the exchange has ended: all ranks must move at the same step.
            if fragment.previous is not None and fragment.steps_made >= self.overlap_steps:
                self._move(fragment)
        for fragment in self._fragments:
            # steps_made may exceed inner_steps if that was lowered, or after a failed exchange.
            passed = fragment.steps_made + fragment.early
            if self.inner_steps is not None and passed >= self.inner_steps:
                self._end_round(
                    fragment,
                    f"the round ended after inner_steps={self.inner_steps} (if ranks take "
                    "different numbers of steps, use inner_steps=None, and call outer_step() on "
                    "all of them)",
                    overlap=self.overlap_steps > 0,
                )
        return loss

    def _begin_round(self) -> None:
        """Keep the center when a round begins; in a new world first compare it with all ranks'."""
        # The script may have set both since the last step, inner_steps also below the others.
        check_rounds(self.inner_steps, 0, 1, 1.0, None)
        check_count("overlap_steps", self.overlap_steps)
        if (here := world.current()) is not self._world:  # after elastic's recovery, say
            for fragment in self._fragments:
                with contextlib.suppress(HorovodInternalError):  # its ranks may be gone
                    if fragment.previous is not None:
                        self._move(fragment)
            self._fragments.enter(here)
            self._world, self._models_compared = here, False
            self._ended = time.perf_counter()
        starting = [fragment for fragment in self._fragments if not fragment.center]
        for fragment in starting:
            self._refuse_new_parameters()
            fragment.center = [p.detach().clone() for p in fragment.parameters]
        if not self._models_compared:
            began = time.perf_counter()
            signature = [*self._signature(), state_of(self.outer, self._names)]
            try:
                for fragment in self._fragments:
                    self.outer_steps = fragment.exchange.agree(
                        fragment.center, signature, self.outer_steps
                    )
            except BaseException:
                for fragment in starting:  # the model may be broadcast before the next attempt
                    fragment.center = []
                raise
            self._fragments.turn = 0  # no exchange is running
            self._models_compared = True
            self._ended += time.perf_counter() - began  # measuring links belongs to no round

    def _refuse_new_parameters(self) -> None:
        refuse_new_parameters(
            self.param_groups,
            self._names.keys(),
            "LocalSGD exchanges the parameters that required a gradient when it was made (for "
            "others, wrap the plain optimizer again)",
        )

    def _signature(self) -> list[str]:
        """Return words for the options that must be equal on all ranks."""
        steps = f"inner_steps={self.inner_steps}, overlap_steps={self.overlap_steps}"
        layout = f"fragments={len(self._fragments)}, residual_decay={self._residual_decay}"
        return [f"{steps}, {layout}", options_of(self.outer)]

    def outer_step(self) -> bool:
        """End the round: combine the changes of all ranks in the model. All ranks must call it.

        With fragments it ends the rounds of all, one after the other; their turns start again.

        Returns whether the model has moved. If no rank has made a step, nothing is done or counted.
        Ranks may have made different numbers of steps, which weight their replicas. A replica that
        is not finite is lost: it becomes the others' model, and the wrapped optimizer starts again
        on its rank.
        Raises HorovodInternalError, on every rank, if the ranks disagree or one is gone: replicas
        and residuals are then restored, except those of fragments that have been exchanged by then.
        Raises FloatingPointError if more outer steps in a row than max_skipped_steps have lost
        replicas or a sum that is not finite.
        """
        self._begin_round()
        moved = False
        for fragment in self._fragments:
            if fragment.previous is not None:
                # `or` last: each fragment must move, even if others have.
                moved = self._move(fragment) or moved
        for fragment in self._fragments:
            moved = self._end_round(fragment, "the script called outer_step()") or moved
        self._fragments.start_rounds(self.inner_steps)
        return moved

    def _end_round(self, fragment: Fragment, why: str, overlap: bool = False) -> bool:
        """End a fragment's round; tell whether the model has moved.

        why: the reason; ranks compare it, because with different reasons they end different rounds.
        overlap: do not wait for the exchange; then return False.
        """
        # If inner_steps was set below overlap_steps, the exchange before is still running.
        moved = fragment.previous is not None and self._move(fragment)
        self._refuse_new_parameters()
        self._fragments.begin(
            fragment,
            [*self._signature(), why],
            self.outer if overlap else None,
            self._world.termination_requested,
        )
        return False if overlap else self._move(fragment) or moved

    def _receive(self) -> None:
        """Wait for the exchanges of the previous rounds, and take the outer steps."""
        for fragment in self._fragments:
            fragment.receive(self.outer, self._world.rank)

    @torch.no_grad()
    def _move(self, fragment: Fragment) -> bool:
        """Move the replica by all ranks' changes in the previous round; tell whether it has moved.

        Steps that it has made since are kept: they are changes of this round.
        """
        fragment.receive(self.outer, self._world.rank)
        previous = fragment.previous
        assert previous is not None
        if previous.error is not None:
            fragment.merge_failed_round(previous)
            raise previous.error
        fragment.previous = None
        with previous.waiting():
            fragment.move_to_center(previous)
        if previous.is_lost:
            # Its moments belong to the replica that was lost.
            self.state.clear()
            for other in self._fragments:
                if other is not fragment:
                    other.reset_to_center(self.outer, self._world.rank)
        outcome = previous.outcome
        if outcome is None:
            return True
        self._world.note_preempted(outcome.preempted)
        if outcome.empty:
            self._ended += previous.waited  # belongs to no round
            return False
        self.outer_steps += 1
        self.skipped_steps += not outcome.moves
        began, self._ended = self._ended, time.perf_counter()
        self.last_step = fragment.exchange.report(
            outcome,
            previous,
            step=max(0, self._world.step - 1),
            compute_seconds=self._ended - began - previous.waited,
            model_elements=sum(p.numel() for p in self._names),
        )
        # A replica lost in one fragment shows in the others' exchanges, too; count it once.
        lost = {rank: n for rank, n in outcome.lost.items() if rank not in previous.reset_ranks}
        for other in self._fragments:
            if other.previous is not None:
                other.previous.reset_ranks.update(lost)
        if lost or outcome.overflowed:
            self._good_steps = 0
            self._lost.note(self._world.rank, self.outer_steps, lost, outcome.moves)
        elif not outcome.lost:
            self._good_steps += 1
            if self._good_steps >= len(self._fragments):  # one bad fragment may fail in every turn
                self._lost.end_row()
        return outcome.moves

    def shared_state(self) -> dict[str, Any]:
        """Return this rank's place in its rounds; wait for the exchanges of the rounds before."""
        self._receive()
        return self._fragments.state(self.outer_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, the outer optimizer's, and this rank's residual.

        In the middle of a round it also holds the center, because the model's own state is then
        this rank's replica. With fragments some are always in the middle of a round, except after
        `outer_step()`. Save it on every rank, as `gtopk.save_checkpoint` does. Waits for exchanges
        that have started.
        """
        # First: it waits for running exchanges, which change residuals and centers.
        round_state = self.shared_state()
        return {
            **super().state_dict(),
            optimizer_checkpoint.KEY: optimizer_checkpoint.save(self._fragments),
            _KEY: {
                "format": _FORMAT,
                "ranks": len(self._fragments.ranks),
                **round_state,
                "outer": self.outer.state_dict(),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Resume from a state; load the model's first.

        On another number of ranks, or with other fragments, the steps of unfinished rounds are
        lost: all ranks go back to their centers. The sum of the residuals stays. The state of a
        plain or a distributed optimizer is fine, too, but its residual is not loaded; a warning
        says that it has no state for the outer optimizer.
        Raises ValueError for a state of another format.
        """
        optimizer_checkpoint.require_state(state_dict)
        own = state_dict.get(_KEY)
        # Before any change: a state of another version must leave this optimizer unchanged.
        if own is not None and own.get("format") != _FORMAT:
            raise ValueError(
                f"the state of LocalSGD must be of format {_FORMAT}, got {own.get('format')!r}; "
                "load it with the version of gtopk that saved it"
            )
        self._receive()  # running exchanges must end; their results are dropped
        super().load_state_dict(state_dict, *args, **kwargs)
        self._lost.end_row()
        self._models_compared = False
        self._fragments.start_rounds(self.inner_steps)
        if own is None:
            _log.warning(
                "the state has no part %r: the outer optimizer's state (its momentum) and the "
                "number of outer steps are not restored; to go on from a LocalSGD run, save the "
                "state_dict() of the optimizer that LocalSGD returns",
                _KEY,
                extra=EVERYWHERE,
            )
        else:
            self.outer.load_state_dict(own["outer"])
            lay_out_as_parameters(self.outer)
            self.outer_steps = own["outer_steps"]
            # Replicas belong to ranks and fragments. If either differs, only the centers can be
            # used, which all ranks share.
            if own["ranks"] == len(self._fragments.ranks) and self._fragments.matches(own):
                self._fragments.load(own)
            elif self._fragments.restore_centers(own):
                _log.warning(
                    "rank %d: the state was saved by %s in the middle of a round, and now "
                    "there are %d%s: all ranks go back to the start of the round and lose its "
                    "steps; save after outer_step() to lose nothing",
                    self._world.rank,
                    counted(own["ranks"], "rank"),
                    len(self._fragments.ranks),
                    "" if self._fragments.matches(own) else ", with other fragments",
                )
        if (part := state_dict.get(optimizer_checkpoint.KEY)) is not None:
            if own is not None:  # older states lack "holds"; LocalSGD's held changes, too
                part = {"holds": optimizer_checkpoint.CHANGES, **part}
            optimizer_checkpoint.load(self._fragments, part)


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    inner_steps: int | None,
    outer: Outer | None = None,
    compression: Compressing = Compression.none,
    *,
    overlap_steps: int = 0,
    fragments: int = 1,
    residual_decay: float = 1.0,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    process_set: ProcessSet = global_process_set,
    max_skipped_steps: int = 10,
) -> _LocalSGD:
    """Return the optimizer: each rank steps by itself, and all combine their changes at intervals.

    The result's class is derived from the optimizer's, and shares its parameter groups and state,
    which stay each rank's own. All ranks must start with the same model (broadcast_parameters); the
    first step checks. Between two rounds their models are the same to the bit, but with
    overlap_steps or fragments only after `outer_step()`: call it before an evaluation. Otherwise
    the ranks agree on the center of every round, which `state_dict()` holds.

    inner_steps: steps between two exchanges; more: less traffic, replicas that drift further apart.
        None: the script calls `outer_step()`, on all ranks. Ranks that make different numbers of
        steps need None: if one's round ends where another calls `outer_step()`, that is an error.
    outer: makes the optimizer that steps with the exchanged change, from a list of parameters.
        None: `nesterov`, as in DiLoCo; with a residual, which delays changes, `averaging`: momentum
        on top of late changes overshoots (docs/local_sgd.md).
    compression: as for DistributedOptimizer; a residual keeps the part of a change that is not
        sent. With momentum_correction the outer optimizer's own momentum must be 0.
        bytes_per_step is for one exchange of each fragment: each gets a share in proportion to
        its elements.
    overlap_steps: steps that a rank makes while changes are exchanged, at most inner_steps. A good
        value is the seconds of an exchange over those of a step. The rank then moves by all ranks'
        changes that many steps late, and keeps its own steps. `outer_step()` waits. 0: every
        exchange is waited for.
    fragments: number of parts of the model, at most inner_steps. Each is exchanged every
        inner_steps steps, in turn: the longest exchange, and a wait for it, becomes that many times
        shorter, while a step sends as many bytes on average. Parts are whole layers, dealt in turn
        by depth and balanced by size (`local_sgd.fragments`). Just after its exchange a part is the
        same on all ranks, until the next step without overlap_steps; other parts differ.
    residual_decay: factor of the residual before a round's changes are added, 0 to 1, as in
        SparseLoCo: changes that have waited for many rounds fade instead of being sent late, and
        that part is lost. 1: nothing is lost. Owners' rounding errors, of `shards`, do not decay.
    named_parameters: pairs of name and parameter, usually model.named_parameters(): for errors,
        and for fragments, which find layers by name; without names, parameters are dealt singly.
    process_set: the ranks that exchange; all of them step together. With DDP inside nodes each rank
        gives its counterparts on the other nodes, as [0, 2] and [1, 3]: DDP's ranks all exchange.
    max_skipped_steps: how many outer steps in a row may have replicas, or a sum of them, that are
        not finite; with fragments, the row ends after as many good steps as there are fragments.
    Calls `hvd.init` if nobody has. Raises ValueError for options out of range.
    """
    check_rounds(inner_steps, overlap_steps, fragments, residual_decay, compression)
    check_count("max_skipped_steps", max_skipped_steps)
    require_compression(compression)
    require_process_set(process_set)
    if isinstance(compression, ErrorFeedback) and (
        compression.dense or compression.dense_vectors or compression.dense_under
    ):
        raise ValueError(
            "LocalSGD reduces whole changes, so per-parameter dense rules are not supported"
        )
    if isinstance(compression, ErrorFeedback) and compression.adam_correction:
        raise ValueError(
            "adam_correction needs gradients, and LocalSGD exchanges changes of the model: wrap "
            "Adam without it; Adam then steps between the rounds"
        )
    if hides_behind_backward(compression):
        raise ValueError(
            "hide_behind_backward=True does not work with LocalSGD: no backward pass runs while "
            "models are exchanged; give density= or bytes_per_step="
        )
    if not world.is_initialized():
        world.init()
    usual = averaging if isinstance(compression, ErrorFeedback) else nesterov
    distributed: _LocalSGD = wrap(optimizer, _LocalSGD)
    distributed._distribute(
        named_parameters,
        inner_steps,
        usual if outer is None else outer,
        compression,
        overlap_steps,
        fragments,
        float(residual_decay),  # so that 1 and 1.0 are equal between ranks
        process_set,
        max_skipped_steps,
    )
    return distributed
