"""LocalSGD: ranks step by themselves, and now and then by what all of them have changed (DiLoCo).

    rank 0    z  x x x x |      | z'  x x x x |      | z"    x: a step of the wrapped optimizer
    rank 1    z  x x x x | wire | z'  x x x x | wire | z"    z: the same bits on every rank

    a_i = e_i + w_i (z - x_i)     w_i: this rank's share of all ranks' steps in the round
    s_i = T(a_i)                  S, r_i = reduce(s_i)
    e_i = a_i - s_i + r_i         z' = the outer optimizer's step from z, with S for its gradient

Law: S + sum e_i(new) = sum e_i(old) + sum w_i (z - x_i). With rounds of one step, all entries sent
and plain descent of rate 1 outside, z' is the mean of the ranks' models. Dense with Nesterov
momentum outside it is DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

Lost replicas: those that were not finite when models were exchanged, and became the others'.

What an outer step cost: its exchange, and the steps of the round that it ends.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from collectives.wire import NOTHING_CODED

from ..compression import Compressing, Compression, ErrorFeedback
from ..errors import check_count
from ..exchange.automatic import hides_behind_backward
from ..exchange.buckets.parameters import name_parameters, require_known
from ..exchange.exchanges import require_compression
from ..optim.momentum import require_one_momentum
from ..optim.replica_check import BUFFERS_STAY, checksums
from ..optim.skip_counter import SkipCounter
from ..optim.wrapped import checkpoint as optimizer_checkpoint
from ..optim.wrapped.tree import lay_out_as_parameters
from ..optim.wrapped.wrapping import Wrapping, wrap
from ..runtime.coordinator.agreement import name_ranks
from ..runtime.world import world
from ..runtime.world.process_sets import ProcessSet, global_process_set
from ..telemetry.recorder import is_sampling_due, sample_residual
from ..telemetry.run_record import balance_of, recorder_of
from ..telemetry.step_report import StepReport
from .outer_exchange import Outcome, OuterExchange


def report_of(
    outcome: Outcome,
    *,
    step: int,
    compute_seconds: float,
    synchronize_seconds: float,
    elements: int,
    local_steps: int,
    predicted_seconds: float | None,
    dense_seconds: float | None = None,
) -> StepReport:
    """Return the report of an outer step.

    compute_seconds: of all steps of the round. elements: values of all parameters.
    predicted_seconds: of the exchange, where it predicts nothing itself; dense_seconds: of a dense
        one.
    """
    operation, done = outcome.operation, outcome.exchanged
    coded = done.coded if done else NOTHING_CODED
    return StepReport(
        step=step,
        algorithm=done.algorithm if done else "",
        compute_seconds=compute_seconds,
        synchronize_seconds=synchronize_seconds,
        select_seconds=done.select_seconds if done else 0.0,
        apply_seconds=0.0,
        agree_seconds=operation.agree_seconds,
        communicate_seconds=operation.agree_seconds + (done.communicate_seconds if done else 0.0),
        merge_seconds=done.merge_seconds if done else 0.0,
        code_seconds=coded.seconds,
        hidden_seconds=0.0,
        working_seconds=done.seconds if done else 0.0,
        buckets=1,
        exchange_seconds=done.seconds if done else 0.0,
        predicted_seconds=(done.predicted_seconds or predicted_seconds) if done else None,
        sent_bytes=operation.traffic.sent_bytes,
        sent_messages=operation.traffic.sent_messages,
        bytes_counted=done.bytes_counted if done else True,
        coded_entries=coded.entries,
        coded_bytes=coded.bytes,
        elements=elements,
        samples=None,
        selected=done.selected if done else 0,
        updated=done.updated if done else 0,
        skipped=not outcome.moves,
        local_steps=local_steps,
        covers="outer step",
        ranks=operation.ranks,
        dense_seconds=dense_seconds if done else None,
    )


class LostReplicas(SkipCounter):
    """How many there were, of all ranks; a row is of outer steps that went without some."""

    def note(self, rank: int, step: int, lost: Mapping[int, Sequence[str]], moved: bool) -> None:
        """Warn, on every rank, of replicas that are not finite.

        lost:  by rank, the parameters that are not; none: their sum is what is not.
        moved: whether the outer step has changed the model, by the replicas of the others.
        Raises FloatingPointError where that were more outer steps in a row than may be.
        """
        self.count += len(lost)
        where = "; ".join(f"rank {r}: {', '.join(map(repr, n[:3]))}" for r, n in lost.items())
        why = f"a replica is not finite on {where}" if lost else "the sum of replicas overflowed"
        _log.warning(
            "rank %d: outer step %d %s: %s",
            rank,
            step,
            f"goes on without {name_ranks(list(lost))}" if moved else "changes nothing",
            f"{why}; {BUFFERS_STAY}" if moved else why,
        )
        self._lengthen(
            lambda n: (
                f"rank {rank}: {n} outer steps in a row were without some replicas, the last, "
                f"number {step}, because {why}"
            )
        )


__all__ = ["LocalSGD", "averaging", "nesterov"]

_log = logging.getLogger("gtopk")
_KEY: Final = "local_sgd"
_FORMAT: Final = 1

# What makes the outer optimizer of these parameters; the model's own, which are z when it steps.
Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def nesterov(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: rate 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def averaging(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain descent of rate 1: dense, z' is the mean of the models."""
    return torch.optim.SGD(parameters, lr=1.0)


class _LocalSGD(Wrapping):
    """What is mixed into the class of the wrapped optimizer.

    outer:         the outer optimizer; a scheduler may set its rate, on all ranks alike.
    inner_steps:   of a round, at least; None: rounds end where `outer_step` is called. May be set,
                   on all ranks alike.
    steps_made:    in this round, by this rank.
    outer_steps:   so far, skipped ones included.
    skipped_steps: outer steps that changed nothing.
    lost_replicas: how often a rank's own was not finite, and became the others'.
    last_step:     what the last outer step cost; None before the first.
    """

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        inner_steps: int | None,
        outer: Outer,
        compression: Any,
        process_set: ProcessSet,
        max_skipped_steps: int,
    ) -> None:
        self.inner_steps = inner_steps
        self.process_set = process_set
        self._names = {
            p: name
            for p, name in name_parameters(self, named_parameters).items()
            if p.requires_grad
        }
        if not self._names:
            raise ValueError("LocalSGD needs a parameter that requires a gradient")
        self.outer = outer(list(self._names))
        if isinstance(compression, ErrorFeedback):
            require_one_momentum(self.outer, compression, outer=True)
        self.steps_made = self.outer_steps = self.skipped_steps = 0
        self.last_step: StepReport | None = None
        self._lost = LostReplicas(max_skipped_steps)
        self._center: list[torch.Tensor] = []  # z, while a round goes on
        self._world = world.current()
        self._exchange = OuterExchange(self._names, compression, process_set, self._world)
        self._are_alike = False  # the ranks' models, as far as is known
        self._ended = time.perf_counter()

    @property
    def lost_replicas(self) -> int:
        """How often a rank's own was not finite, and became the others'."""
        return self._lost.count

    @property
    def apart(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters that are each rank's own now: all of them, within a round."""
        return self._names.keys() if self._center else ()

    def besides(self) -> list[torch.optim.Optimizer]:
        return [self.outer]

    def in_common(self) -> dict[str, Any]:
        return {
            "outer_steps": self.outer_steps,
            "steps_made": self.steps_made,
            "center": self._center,
        }

    def go_on_from(self, common: dict[str, Any]) -> None:
        """Be where another rank is in its round; its replica comes with broadcast_parameters."""
        self.outer_steps, self.steps_made = common["outer_steps"], common["steps_made"]
        self._center = self._as_center(common["center"])
        self._are_alike = False

    def _as_center(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies, laid out as the parameters are; of no tensors none."""
        pairs = zip(self._names, tensors, strict=True) if tensors else ()
        return [torch.empty_like(p).copy_(tensor) for p, tensor in pairs]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's replica with its own gradients; end the round where it is time.

        closure: called once, before, to compute the loss and the gradients.
        """
        self._begin_round()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_wrapped()
        self.steps_made += 1
        self._world.step += 1
        # More than that where it was lowered since, or an exchange that was due has failed.
        if self.inner_steps is not None and self.steps_made >= self.inner_steps:
            self._end_round(
                f"the round was over after inner_steps={self.inner_steps} (where ranks make unlike "
                "numbers of steps, use inner_steps=None, and call outer_step() on all of them)"
            )
        return loss

    def _begin_round(self) -> None:
        """Keep the center, where a round is about to begin; in the first, look at all ranks'."""
        if (here := world.current()) is not self._world:  # after elastic's recovery, say
            self._exchange.enter(here)
            self._world, self._are_alike = here, False
            self._ended = time.perf_counter()
        if not self._center:
            require_known(
                self.param_groups,
                self._names.keys(),
                "LocalSGD (make another of the plain optimizer) exchanges the parameters that "
                "required a gradient when it was made",
            )
            self._center = [p.detach().clone() for p in self._names]
        if not self._are_alike:
            begun = time.perf_counter()
            self.outer_steps = self._exchange.meet(
                self._center, [*self._signature(), self._outer_state_said()], self.outer_steps
            )
            self._are_alike = True
            self._ended += time.perf_counter() - begun  # of no round: links may be measured

    def _signature(self) -> list[str]:
        """Return what must be equal on all ranks, in words."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.outer.param_groups
        ]
        return [
            f"inner_steps={self.inner_steps}",
            f"outer {type(self.outer).__name__} {groups}",
        ]

    def _outer_state_said(self) -> str:
        """Return what tells the outer optimizer's state from another: all ranks have the same."""
        state = [value for p in self._names for value in self.outer.state.get(p, {}).values()]
        tensors = checksums([value for value in state if isinstance(value, torch.Tensor)])
        others = [value for value in state if isinstance(value, (int, float))]
        return (
            f"state of the outer optimizer {zlib.crc32(tensors.tobytes()):08x} {others} "
            "(all ranks load, or broadcast_optimizer_state gives them one's)"
        )

    def outer_step(self) -> bool:
        """End the round: move the model of all ranks by what they have changed; they call it alike.

        Return whether it has moved. Where no rank has made a step there is nothing to end, and
        nothing is counted. Ranks may have made different numbers of steps: a replica weighs as many
        as it made. One that is not finite is lost: it becomes the others' model, and
        the wrapped optimizer begins anew on its rank.
        Raises HorovodInternalError, on every rank alike, when the ranks disagree or one is gone:
        replicas and residuals are then as before. FloatingPointError when replicas were lost, or a
        sum was not finite, more often in a row than may be.
        """
        return self._end_round("the script called outer_step()")

    @torch.no_grad()
    def _end_round(self, why: str) -> bool:
        """Make an outer step; `why` is the same on all ranks, as else they end unlike rounds."""
        self._begin_round()
        begun = time.perf_counter()
        preempted, made = self._world.termination_requested, self.steps_made
        with self._exchange.reduced(
            self._center, [*self._signature(), why], made, preempted
        ) as outcome:
            torch._foreach_copy_(list(self._names), self._center)
            if outcome.moves:
                self.outer.step()
        if self._world.rank in outcome.lost:
            self.state.clear()
        self._world.note_preempted(outcome.preempted)
        self._center, self.steps_made = [], 0
        if outcome.empty:
            self._ended += time.perf_counter() - begun  # of no round
            return False
        self.outer_steps += 1
        self.skipped_steps += not outcome.moves
        self._report(outcome, begun, made)
        if outcome.lost or outcome.overflowed:
            self._lost.note(self._world.rank, self.outer_steps, outcome.lost, outcome.moves)
        else:
            self._lost.end_row()
        return outcome.moves

    def _report(self, outcome: Outcome, begun: float, made: int) -> None:
        """Fill in `last_step`."""
        began, self._ended = self._ended, time.perf_counter()
        self.last_step = report_of(
            outcome,
            step=self._world.step - 1,
            compute_seconds=begun - began,
            synchronize_seconds=self._ended - begun,
            elements=sum(p.numel() for group in self.param_groups for p in group["params"]),
            local_steps=made,
            predicted_seconds=self._exchange.expected.seconds,
            dense_seconds=self._exchange.expected.dense_seconds,
        )
        balance_of(self._world).note(self.last_step)
        if (recorder := recorder_of(self._world)) is not None:
            recorder.note_step(self.last_step)
            if outcome.moves and is_sampling_due(self._exchange.steps):
                sample_residual(recorder, [self._exchange])

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, the outer one's, and this rank's residual.

        In the middle of a round it holds the center, too: the model's own state is this rank's
        replica then. Save it on every rank, as `gtopk.save_checkpoint` does.
        """
        return {
            **super().state_dict(),
            optimizer_checkpoint.KEY: optimizer_checkpoint.save(self._exchange),
            _KEY: {
                "format": _FORMAT,
                "ranks": len(self._exchange.ranks),
                "steps_made": self.steps_made,
                "outer_steps": self.outer_steps,
                "center": [tensor.clone() for tensor in self._center],
                "outer": self.outer.state_dict(),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Go on from a state; load the model's first.

        On another number of ranks, the steps of a round that was under way are lost: all ranks go
        back to its center. The sum of the residual stays. A plain optimizer's state is fine,
        also a distributed one's, but for its residual.
        Raises ValueError for a state of another format.
        """
        own = state_dict.get(_KEY)
        if own is not None and own.get("format") != _FORMAT:
            raise ValueError(
                f"the state of LocalSGD must be of format {_FORMAT}, got {own.get('format')!r}; "
                "load it with the version of gtopk that saved it"
            )
        super().load_state_dict(state_dict, *args, **kwargs)
        self._lost.end_row()
        self._center, self.steps_made, self._are_alike = [], 0, False
        if own is not None:
            self.outer.load_state_dict(own["outer"])
            lay_out_as_parameters(self.outer)
            self.outer_steps = own["outer_steps"]
            self._load_round(own["center"], own["steps_made"], own["ranks"])
        if (part := state_dict.get(optimizer_checkpoint.KEY)) is not None:
            if own is not None:  # before parts said what they hold, LocalSGD's were changes, too
                part = {"holds": optimizer_checkpoint.CHANGES, **part}
            optimizer_checkpoint.load(self._exchange, part)

    def _load_round(self, center: Sequence[torch.Tensor], steps_made: int, ranks: int) -> None:
        if not center:
            return
        if ranks == len(self._exchange.ranks):
            self._center, self.steps_made = self._as_center(center), steps_made
            return
        torch._foreach_copy_(list(self._names), list(center))
        _log.warning(
            "rank %d: the state is of %d ranks in the middle of a round, and here are %d: all go "
            "back to where it began; save after an outer step to lose nothing",
            self._world.rank,
            ranks,
            len(self._exchange.ranks),
        )


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    inner_steps: int | None,
    outer: Outer | None = None,
    compression: Compressing = Compression.none,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    process_set: ProcessSet = global_process_set,
    max_skipped_steps: int = 10,
) -> _LocalSGD:
    """Return the optimizer, stepping on each rank by itself, and every so many steps with all.

    The result is of a class derived from the optimizer's own, and shares its parameter groups and
    state, which stay each rank's own. All ranks begin with the same model (broadcast_parameters):
    the first step looks. Between rounds their models are the same to the bit.

    inner_steps: between two exchanges; None: they are where the script calls `outer_step()`, as all
        ranks must. Ranks that make unlike numbers of steps need None: with a number, one's round is
        over where another calls `outer_step()` at its epoch's end, which is an error on all.
    outer: makes the optimizer that steps with the exchanged change, of a list of parameters.
        None: `nesterov`, as in DiLoCo; where a residual delays changes, `averaging`: momentum on
        top of what comes late overshoots (docs/local_sgd.md).
    compression: as DistributedOptimizer's; what is not sent of a change waits in a residual. With
        momentum_correction the outer optimizer's own momentum must be 0: another is refused.
    named_parameters: pairs of name and parameter, usually model.named_parameters(); for errors.
    process_set: the ranks that exchange; all of them step alike. With DDP inside nodes each rank
        gives its counterparts on the other nodes, [0, 2] or [1, 3] say: DDP's ranks all exchange.
    max_skipped_steps: in how many outer steps in a row replicas may be lost, not being finite.
    Joins the ranks (`hvd.init`) where nobody has. Raises ValueError for options out of range.
    """
    if inner_steps is not None:
        check_count("inner_steps", inner_steps)
        if inner_steps == 0:
            raise ValueError("inner_steps must be at least 1, or None, got 0")
    check_count("max_skipped_steps", max_skipped_steps)
    require_compression(compression)
    if isinstance(compression, ErrorFeedback) and (
        compression.dense or compression.dense_vectors or compression.dense_under
    ):
        raise ValueError(
            "LocalSGD reduces whole changes, so per-parameter dense rules are not supported"
        )
    if isinstance(compression, ErrorFeedback) and compression.adam_correction:
        raise ValueError(
            "adam_correction makes Adam's steps of gradients, and LocalSGD exchanges changes of "
            "the model: wrap Adam itself, which steps between the rounds"
        )
    if hides_behind_backward(compression):
        raise ValueError(
            "hide_behind_backward=True is not for LocalSGD: no backward pass goes on while models "
            "are exchanged; give density= or bytes_per_step="
        )
    if not world.is_initialized():
        world.init()
    outer = outer or (averaging if isinstance(compression, ErrorFeedback) else nesterov)
    distributed: _LocalSGD = wrap(optimizer, _LocalSGD)
    distributed._distribute(
        named_parameters, inner_steps, outer, compression, process_set, max_skipped_steps
    )
    return distributed
