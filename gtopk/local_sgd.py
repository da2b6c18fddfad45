"""LocalSGD: ranks step by themselves, and now and then by what all of them have changed (DiLoCo).

    rank 0    z  x x x x |      | z'  x x x x |      | z"    x: a step of the wrapped optimizer
    rank 1    z  x x x x | wire | z'  x x x x | wire | z"    z: the same bits on every rank

    a_i = e_i + w_i (z - x_i)     w_i: this rank's share of all ranks' steps in the round
    s_i = T(a_i)                  S, r_i = reduce(s_i)
    e_i = a_i - s_i + r_i         z' = the outer optimizer's step from z, with S for its gradient

Law: S + sum e_i(new) = sum e_i(old) + sum w_i (z - x_i). With rounds of one step, all entries sent
and plain descent of rate 1 outside, z' is the mean of the ranks' models. Dense with Nesterov
momentum outside it is DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from collectives.transports import Transport
from collectives.wire import NOTHING_CODED

from . import optimizer_checkpoint, world
from .agreement import gather_words, name_ranks
from .compression import Compression, ErrorFeedback, check_count, hides_behind_backward
from .engine import Operation
from .exchange import Exchanged, Progress
from .exchanges import require_compression
from .held import Held, has_room, put_in, take_out, unsent
from .held_names import strangers, under_known_names
from .lanes import Lane, open_lane
from .optimizer_tree import lay_out_as_parameters
from .parameters import name_parameters, require_known
from .process_sets import ProcessSet, global_process_set
from .replicas import checksums, require_the_same
from .telemetry import StepReport
from .world import World
from .wrapping import Wrapping, wrap

__all__ = ["LocalSGD", "averaging", "nesterov"]

_log = logging.getLogger("gtopk")
_KEY: Final = "local_sgd"
_FORMAT: Final = 1
_FINITE, _TOLD = 1, 2  # of a vote, below the steps: this rank's replica is, and was told to end

# What makes the outer optimizer of these parameters; the model's own, which are z when it steps.
Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def nesterov(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: rate 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def averaging(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain descent of rate 1: dense, z' is the mean of the models."""
    return torch.optim.SGD(parameters, lr=1.0)


class _Outcome(NamedTuple):
    """What an exchange came to, the same on every rank.

    steps:     by rank, of the round; 0 for a replica that is lost, or made none.
    told:      the ranks that were told to end.
    culprits:  by rank, the parameters that are not finite; empty where all are.
    exchanged: None: there was nothing to exchange.
    """

    steps: list[int]
    told: list[int]
    culprits: list[list[str]]
    exchanged: Exchanged | None


class _LocalSGD(Wrapping):
    """What is mixed into the class of the wrapped optimizer.

    outer:         the outer optimizer; a scheduler may set its rate, on all ranks alike.
    inner_steps:   of a round, at least; None: rounds end where `outer_step` is called. May be set,
                   on all ranks alike.
    steps_made:    in this round, by this rank.
    outer_steps:   so far, those that changed nothing included.
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
        self._compression = compression
        self._max_skipped_steps = max_skipped_steps
        self._names = {
            p: name
            for p, name in name_parameters(self, named_parameters).items()
            if p.requires_grad
        }
        if not self._names:
            raise ValueError("LocalSGD needs a parameter that requires a gradient")
        self.outer = outer(list(self._names))
        self._progress = Progress()
        self.steps_made = self.outer_steps = self.skipped_steps = self.lost_replicas = 0
        self.last_step: StepReport | None = None
        self._lost_in_a_row = 0
        self._center: list[torch.Tensor] = []  # z, while a round goes on
        self._lane: Lane | None = None
        self._strange: dict[str, Held] = {}  # of names that no parameter has; saved again
        self._held: dict[str, Held] = {}  # what the lane has no room for, until the ranks agree
        self._enter(world.current())

    def _enter(self, here: World) -> None:
        """Take part in a world: the first, or the next one after `shutdown`, or a failure."""
        self._engine, self._ranks = self.process_set.engine, self.process_set.members.ranks
        self._world = here
        self._place = list(self._ranks).index(here.rank)
        self._name = f"local_sgd.{here.name_optimizer(self._names.values())}"
        self._ended = time.perf_counter()
        held = self._take_out()
        self._lane = open_lane(
            self._name,
            list(self._names),
            list(self._names.values()),
            self._compression,
            self._progress,
        )
        self._hold(self._lane, held)

    def _hold(self, lane: Lane, held: dict[str, Held]) -> None:
        """Hold this back; the ranks are to look at each other before they go on."""
        put_in([lane], held)
        self._held = {} if has_room(lane) else held
        self._are_alike = False

    def _take_out(self) -> dict[str, Held]:
        """Return what is held back, by parameter name."""
        return self._held if self._lane is None else {**self._held, **take_out([self._lane])}

    @property
    def apart(self) -> Collection[torch.nn.Parameter]:
        """Return the parameters that are each rank's own now: all of them, within a round."""
        return self._names.keys() if self._center else ()

    # ---- the steps of this rank

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
            self.outer_step()
        return loss

    def _begin_round(self) -> Lane:
        """Keep the center, where a round is about to begin; in the first, look at all ranks'."""
        if (here := world.current()) is not self._world:  # after elastic's recovery, say
            self._enter(here)
        assert self._lane is not None
        if not self._center:
            require_known(
                self.param_groups,
                self._names.keys(),
                "LocalSGD (make another of the plain optimizer) exchanges the parameters that "
                "required a gradient when it was made",
            )
            self._center = [p.detach().clone() for p in self._lane.parameters]
        if not self._are_alike:
            self._look_at_all(self._lane)
        return self._lane

    def _look_at_all(self, lane: Lane) -> None:
        """Make sure that all begin with one model, and know whether any holds back what is new."""
        own, names = checksums(self._center), list(self._names.values())

        def look(transport: Transport, votes: list[int]) -> bool:
            require_the_same(transport, own, names)
            return any(votes)

        of_any = self._engine.submit(
            f"{self._name}.replicas", self._facts(lane), look, vote=bool(unsent(self._held))
        ).wait()
        if of_any:
            lane.send_along()
            put_in([lane], self._held)
        self._held = {}
        self._are_alike = True

    def _facts(self, lane: Lane) -> list[str]:
        """Return what must be equal on all ranks, in words."""
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.outer.param_groups
        ]
        return [
            f"inner_steps={self.inner_steps}",
            f"outer {type(self.outer).__name__} {groups}",
            lane.facts,
            *(f"parameter '{name}' {list(p.shape)} {p.dtype}" for p, name in self._names.items()),
        ]

    # ---- the step of all ranks

    @torch.no_grad()
    def outer_step(self) -> bool:
        """End the round: move the model of all ranks by what they have changed; they call it alike.

        Return whether it has moved. Ranks may have made different numbers of steps: a replica
        weighs as many as it made. One that is not finite is lost: it becomes the others' model, and
        the wrapped optimizer begins anew on its rank.
        Raises HorovodInternalError, on every rank alike, when the ranks disagree or one is gone:
        replicas and residuals are then as before. FloatingPointError when replicas were lost, or a
        sum was not finite, more often in a row than may be.
        """
        lane = self._begin_round()
        begun = time.perf_counter()
        gradients = [p.grad for p in lane.parameters]
        try:
            operation, outcome = self._exchange(lane)
            torch._foreach_copy_(list(lane.parameters), self._center)
            moved = outcome.exchanged is not None and outcome.exchanged.finite
            if moved:
                lane.apply(())
                self.outer.step()
                self._progress.steps += 1
            else:
                lane.undo()
        finally:
            lane.let_go()
            for parameter, gradient in zip(lane.parameters, gradients, strict=True):
                parameter.grad = gradient
        if outcome.culprits and outcome.culprits[self._place]:
            self.state.clear()
        self._world.hear(outcome.told)
        self._center = []
        made, self.steps_made = self.steps_made, 0
        self.outer_steps += 1
        self.skipped_steps += not moved
        self._report(operation, outcome, begun, moved, made)
        self._count_lost(outcome, moved)
        return moved

    def _exchange(self, lane: Lane) -> tuple[Operation, _Outcome]:
        """Take the pseudo-gradients, and reduce them; they are in the place of the gradients."""
        pseudo = torch._foreach_sub(self._center, [p.detach() for p in lane.parameters])
        for parameter, gradient in zip(lane.parameters, pseudo, strict=True):
            parameter.grad = gradient
        lane.take(1.0, 1.0)
        mine = [] if lane.all_finite() else lane.not_finite()
        if mine:
            torch._foreach_zero_(pseudo)  # a weight of 0 makes no numbers of them
        operation = self._engine.submit(
            f"{self._name}.outer",
            self._facts(lane),
            partial(self._reduce, lane, mine),
            vote=(0 if mine else self.steps_made << 2 | _FINITE)
            | (_TOLD if self._world.told_here else 0),
        )
        try:
            return operation, operation.wait()
        except BaseException:
            lane.undo()
            raise

    def _reduce(
        self, lane: Lane, mine: list[str], transport: Transport, votes: list[int]
    ) -> _Outcome:
        """Run on the engine's thread, on every rank."""
        steps = [vote >> 2 for vote in votes]
        told = [transport.ranks[place] for place, vote in enumerate(votes) if vote & _TOLD]
        culprits = [] if all(vote & _FINITE for vote in votes) else gather_words(transport, mine)
        if not any(steps):
            return _Outcome(steps, told, culprits, None)
        lane.remember()
        lane.weigh(steps[transport.rank] / sum(steps))
        return _Outcome(steps, told, culprits, lane.reduce(transport))

    def _count_lost(self, outcome: _Outcome, moved: bool) -> None:
        """Warn, on every rank, of replicas that are not finite; raise where that is too often."""
        lost = {rank: n for rank, n in zip(self._ranks, outcome.culprits, strict=False) if n}
        self.lost_replicas += len(lost)
        if not lost and (moved or outcome.exchanged is None):  # or nobody made a step
            self._lost_in_a_row = 0
            return
        self._lost_in_a_row += 1
        where = "; ".join(f"rank {r}: {', '.join(map(repr, n[:3]))}" for r, n in lost.items())
        why = f"a replica is not finite on {where}" if lost else "the sum of replicas overflowed"
        _log.warning(
            "rank %d: outer step %d %s: %s",
            self._world.rank,
            self.outer_steps,
            f"goes on without {name_ranks(list(lost))}" if moved else "changes nothing",
            why,
        )
        if self._lost_in_a_row > self._max_skipped_steps:
            raise FloatingPointError(
                f"rank {self._world.rank}: {self._lost_in_a_row} outer steps in a row were without "
                f"some replicas, the last, number {self.outer_steps}, because {why}; "
                f"max_skipped_steps={self._max_skipped_steps} allows as many"
            )

    def _report(
        self, operation: Operation, outcome: _Outcome, begun: float, moved: bool, made: int
    ) -> None:
        """Fill in `last_step`: compute_seconds are those of all steps of the round."""
        done, began, self._ended = outcome.exchanged, self._ended, time.perf_counter()
        coded = done.coded if done else NOTHING_CODED
        self.last_step = StepReport(
            step=self._world.step - 1,
            algorithm=done.algorithm if done else "",
            compute_seconds=begun - began,
            synchronize_seconds=self._ended - begun,
            select_seconds=done.select_seconds if done else 0.0,
            apply_seconds=0.0,
            agree_seconds=operation.agree_seconds,
            communicate_seconds=operation.agree_seconds
            + (done.communicate_seconds if done else 0.0),
            merge_seconds=done.merge_seconds if done else 0.0,
            code_seconds=coded.seconds,
            hidden_seconds=0.0,
            working_seconds=done.seconds if done else 0.0,
            buckets=1,
            exchange_seconds=self._ended - begun,
            predicted_seconds=done.predicted_seconds if done else None,
            sent_bytes=operation.traffic.sent_bytes,
            sent_messages=operation.traffic.sent_messages,
            bytes_counted=done.bytes_counted if done else True,
            coded_entries=coded.entries,
            coded_bytes=coded.bytes,
            elements=sum(p.numel() for group in self.param_groups for p in group["params"]),
            samples=None,
            selected=done.selected if done else 0,
            updated=done.updated if done else 0,
            skipped=not moved,
            local_steps=made,
            covers="outer step",
        )
        if self._world.recorder is not None:
            self._world.recorder.note_step(self.last_step)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, the outer one's, and what this rank holds back.

        In the middle of a round it holds the center, too: the model's own state is this rank's
        replica then. Save it on every rank, as `gtopk.save_checkpoint` does.
        """
        assert self._lane is not None
        ranks = len(self._ranks)
        return {
            **super().state_dict(),
            optimizer_checkpoint.KEY: {
                "format": optimizer_checkpoint.FORMAT,
                "ranks": ranks,
                "steps": self._progress.steps,
                "lanes": [self._lane.record()],
                "held": {self._place: {**self._strange, **self._take_out()}},
            },
            _KEY: {
                "format": _FORMAT,
                "ranks": ranks,
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
        back to its center. The sum of what is held back stays. A plain optimizer's state is fine.
        Raises ValueError for a state of another format.
        """
        assert self._lane is not None
        own = state_dict.get(_KEY)
        if own is not None and own.get("format") != _FORMAT:
            raise ValueError(
                f"the state of LocalSGD must be of format {_FORMAT}, got {own.get('format')!r}; "
                "load it with the version of gtopk that saved it"
            )
        super().load_state_dict(state_dict, *args, **kwargs)
        self._center, self.steps_made, self._are_alike = [], 0, False
        if own is not None:
            self.outer.load_state_dict(own["outer"])
            lay_out_as_parameters(self.outer)
            self.outer_steps = own["outer_steps"]
            self._load_round(own["center"], own["steps_made"], own["ranks"])
        if (part := state_dict.get(optimizer_checkpoint.KEY)) is not None:
            known = set(self._lane.names)
            held = optimizer_checkpoint.share_of(part, self._place, len(self._ranks))
            held = under_known_names(held, known)
            self._hold(self._lane, {name: of for name, of in held.items() if name in known})
            self._strange = strangers(
                held,
                known,
                self._world.rank,
                "LocalSGD trains no parameter of that name; give it the names that the checkpoint "
                "was saved with (named_parameters)",
            )
            for record in optimizer_checkpoint.lanes_here(part, known):
                if record["names"] == self._lane.names:
                    self._lane.resume(record)
            self._progress.steps = int(part["steps"])

    def _load_round(self, center: Sequence[torch.Tensor], steps_made: int, ranks: int) -> None:
        if not center:
            return
        if ranks == len(self._ranks):
            self._center = [
                torch.empty_like(p).copy_(c) for c, p in zip(center, self._names, strict=True)
            ]
            self.steps_made = steps_made
            return
        torch._foreach_copy_(list(self._names), list(center))
        _log.warning(
            "rank %d: the state is of %d ranks in the middle of a round, and here are %d: all go "
            "back to where it began; save after an outer step to lose nothing",
            self._world.rank,
            ranks,
            len(self._ranks),
        )


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    inner_steps: int | None,
    outer: Outer | None = None,
    compression: Any = Compression.none,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    process_set: ProcessSet = global_process_set,
    max_skipped_steps: int = 10,
) -> Any:
    """Return the optimizer, stepping on each rank by itself, and every so many steps with all.

    The result is of a class derived from the optimizer's own, and shares its parameter groups and
    state, which stay each rank's own. All ranks begin with the same model (broadcast_parameters):
    the first step looks. Between rounds their models are the same to the bit.

    inner_steps: between two exchanges; None: they are where the script calls `outer_step()`, as all
        ranks must at the end of an epoch in which they made unlike numbers of steps.
    outer: makes the optimizer that steps with the exchanged change, of a list of parameters.
        None: `nesterov`, as in DiLoCo; where a residual delays changes, `averaging`: momentum on
        top of what comes late overshoots (docs/local_sgd.md).
    compression: as DistributedOptimizer's; what is not sent of a change waits in a residual. With
        momentum_correction the outer optimizer's own momentum must be 0.
    named_parameters: pairs of name and parameter, usually model.named_parameters(); for errors.
    process_set: the ranks that exchange, say one of each node; all of them step alike.
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
        raise ValueError("a model's change travels as one: dense parameters are not possible")
    if hides_behind_backward(compression):
        raise ValueError(
            "hide_behind_backward=True is not for LocalSGD: no backward pass goes on while models "
            "are exchanged; give density= or bytes_per_step="
        )
    if not world.is_initialized():
        world.init()
    outer = outer or (averaging if isinstance(compression, ErrorFeedback) else nesterov)
    distributed = wrap(optimizer, _LocalSGD)
    distributed._distribute(
        named_parameters, inner_steps, outer, compression, process_set, max_skipped_steps
    )
    return distributed
