"""Reducer: an optimizer's gradients become what all ranks agreed on, while backward goes on.

first step   nothing is known of the order of gradients: all ranks plan, then exchange
later        a lane is submitted when its gradients are complete, the last by `reduce`
any time     a rank has a gradient that belongs to no lane (a layer was added or unfrozen, an
             embedding became sparse): the round is void, all ranks plan anew and exchange
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from collectives.errors import MismatchError
from collectives.planning import Calibration
from collectives.transports import Transport

from . import advice, world
from .agreement import name_ranks
from .calibration import calibration_of
from .compression import hides_behind_backward
from .engine import Engine, Work
from .exchange import Progress
from .expectation import expected_seconds
from .grad_scaler import loss_scale
from .held import Held, has_room, put_in, take_out, unsent
from .held_names import strangers
from .hooks import BackwardHooks
from .lane_plan import Agreed, Plan
from .lanes import Lane
from .logs import EVERYWHERE
from .optimizer_options import Options
from .parameters import ParameterNames, with_gradients
from .reductions import Average
from .rounds import AnyLane, Round
from .samples import Samples
from .sparse_gradients import SparseGradientLane
from .stragglers import Stragglers
from .weights import LocalClip
from .world import World

_log = logging.getLogger("gtopk")
_LEFT_OUT: Final = b"not where a rank has joined"

# Of each engine, by name: who stands in for a rank that has joined.
_reducers_of: WeakKeyDictionary[Engine, WeakValueDictionary[str, Reducer]] = WeakKeyDictionary()


def _stand_in(reducers: Mapping[str, Reducer], name: str, recipe: bytes) -> Work:
    """Return what a rank that has joined does of an operation of others."""
    if recipe == _LEFT_OUT:
        return lambda transport, votes: None
    of, _, index = name.rpartition(".")
    if of not in reducers:
        raise RuntimeError(f"this rank has joined, and its optimizer of {of} is no more")
    return reducers[of].stand_in(int(index))


class Reducer:
    """Reduces the gradients of an optimizer's parameters.

    name:     of the operations: every rank's optimizer of these parameters has the same.
    names:    of all parameters; those that come later are added.
    progress: what exchanges go by; its steps are counted by whoever applies the rounds.
    lanes:    in the order in which backward completes them; none before the first step.
    scaler:   the GradScaler that the gradients are scaled by, where there is one.
    samples:  that this rank's gradients come from; where nobody says, op weighs them.
    ranks:    of the world that reduce together, in order; rank: this one's place among them.
    takes_part: whether this rank is one of them: it steps by itself otherwise.
    aside_for: the mode of `adapt` that gradients are exchanged by in its place; "": none.
    stragglers: how fast they compute beside each other.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,  # the plain one: ours holds this reducer
        names: ParameterNames,
        options: Options,
        here: World,
        scaler: Any,
    ) -> None:
        self.names = names
        self.options = options
        self.progress = Progress()
        self.lanes: list[AnyLane] = []
        self.scaler = scaler
        self.samples = Samples()
        self._predicted_seconds: float | None = None
        self.overlaps = options.overlap and options.local_clip_norm is None
        self.aside_for = ""
        self._optimizer = optimizer
        self._lane_of: dict[torch.nn.Parameter, int] = {}
        self._awaited: list[set[torch.nn.Parameter]] = []
        self._facts = ""
        self._round: Round | None = None
        self._ghost: Round | None = None  # of the others, while this rank has joined
        self._held: dict[str, Held] = {}  # of parameters in no lane: not yet, or frozen
        self._strangers: set[str] = set()  # names that no parameter has, and were warned of
        self._wanted: list[dict[str, Any]] = []  # records of lanes that were loaded with it
        self._loaded_steps: int | None = None  # None: nothing was loaded since the last plan
        self.hooks = BackwardHooks(names, on_complete=weakref.WeakMethod(self._complete))
        self.enter(here)

    def enter(self, here: World) -> None:
        """Take part in a world: the first, or the next one after `shutdown`, or a failure.

        What this rank held back stays; the ranks plan anew. Raises ValueError where the process set
        is not registered.
        """
        members = self.options.process_set.registered()
        round, self._round = self._round, None
        if round is not None:
            round.drop()
        if self.lanes:
            self._held, self._wanted = self.take_state_out()
            self.lanes, self._lane_of = [], {}
        self.name = f"gradients.{here.name_optimizer(self.names.values())}"
        self._world = here
        self.takes_part = here.rank in members.ranks
        self.ranks: Sequence[int] = [here.rank]
        self._engine = here.engine
        if self.takes_part:
            self.ranks, self._engine = members.ranks, self.options.process_set.engine
        self._size, self.rank = len(self.ranks), self.ranks.index(here.rank)
        if self._size > 1:
            self.hooks.watch(self.trained())
        self.stragglers = Stragglers(here, self._engine, self.name)
        _reducers_of.setdefault(self._engine, WeakValueDictionary())[self.name] = self
        self._engine.stand_in = partial(_stand_in, _reducers_of[self._engine])

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that may have a gradient of some values, in the optimizer's order.

        An empty one takes part in nothing: there is nothing of it to exchange.
        """
        return [p for p in with_gradients(self._param_groups) if p.numel()]

    def stand_aside(self, mode: str) -> None:
        """Exchange nothing, and look at nothing: a mode of `adapt` does."""
        self.aside_for, self.overlaps = mode, False
        self.hooks = BackwardHooks(self.names)  # deaf: the old ones go, and count no passes more

    def reduce(self) -> Round:
        """Exchange all gradients; the round that counts is to be applied, or skipped.

        Raises HorovodInternalError, on every rank alike, when the ranks disagree; the residuals are
        then what they were.
        """
        if self.hooks.order:
            self.progress.backward_seconds = self.hooks.seconds
            self.progress.backward_began = self.hooks.began
        round, self._round = self._round, None
        order = self.hooks.order
        self.hooks.forget()  # also where this fails: the next step counts
        if round is not None and round.samples != self.samples:  # said after backward
            round.invalidate()
        self._make_dense()
        if not self.lanes:
            self._plan(order)
        while True:
            round = round or self._open()
            try:
                round.finish(self._has_unplanned(), told=self._world.told_here)
            except BaseException as error:
                if not isinstance(error, Exception):
                    _log.warning(
                        "rank %d: interrupted (%s) in a step, which the other ranks are to end "
                        "first; a second time ends the wait at once",
                        self.ranks[self.rank],
                        type(error).__name__,
                        extra=EVERYWHERE,
                    )
                round.drop()
                raise
            finally:
                self._await_all()
            self._world.hear(round.told)
            if not round.void:
                return round
            round.drop()
            if round.changed:
                self._stop_overlapping(
                    "gradients are changed or dropped, or their samples told, after backward()"
                )
            if round.unplanned:
                self._plan(order)
            round = None

    def drop(self) -> None:
        """Forget what was computed towards the next step.

        A round that has begun goes on until `reduce`: the other ranks may be in it. By then other
        gradients will be there, so that it will be void.
        """
        self.hooks.forget()
        self._await_all()

    def drops_overflow(self) -> bool:
        """Tell whether `drop` forgets complete gradients that are not finite here."""
        if self.aside_for or not self.hooks.order or self._size == 1:
            return False
        gradients = [p.grad for p in self.hooks.order if p.grad is not None]
        return not all(bool(g.detach().isfinite().all()) for g in gradients if not g.is_sparse)

    def in_flight(self) -> dict[torch.nn.Parameter, Any]:
        """Return the operations on their way, by parameter."""
        if self._round is None:
            return {}
        return {
            parameter: operation
            for index, operation in self._round.operations.items()
            for parameter in self.lanes[index].parameters
        }

    def run_on_all(self, what: str, facts: Sequence[str], work: Work) -> Any:
        """Run something else that concerns these parameters on all ranks together."""
        return self._engine.submit(f"{self.name}.{what}", facts, work).wait()

    def run_unless_joined(self, what: str, work: Callable[[Transport], Any]) -> Any:
        """Run it on all ranks together; return None, on all alike, where one of them has joined."""

        def unless(transport: Transport, votes: list[int]) -> Any:
            return work(transport) if all(votes) else None

        name = f"{self.name}.{what}"
        return self._engine.submit(name, [], unless, vote=1, recipe=_LEFT_OUT).wait()

    def known_names(self) -> set[str]:
        """Return the names of all parameters, those that are not stepped yet included."""
        return self.names.known()

    def take_state_out(self) -> tuple[dict[str, Held], list[dict[str, Any]]]:
        """Return what was held back of each parameter after the last step, and lanes' records."""
        if not self.lanes:
            return self._held, self._wanted
        if self._round is not None:
            self._round.settle()
        held = {**self._held, **take_out(self.lanes)}
        if self._loaded_steps is not None:
            return held, self._wanted
        return held, [lane.record() for lane in self.lanes]

    def put_state_in(
        self, held: Mapping[str, Held], lanes: list[dict[str, Any]], steps: int
    ) -> None:
        """Hold this back from now on; where rank 0 does, go on from its steps in lanes like these.

        Other ranks may load nothing: until the next plan what all agree on stays as it is.
        """
        if self._round is not None:
            self._round.invalidate()
        if self.lanes:
            put_in(self.lanes, held)
        self._held, self._wanted, self._loaded_steps = dict(held), lanes, steps

    @property
    def steps(self) -> int:
        """Return how many were taken, those before what was loaded last included."""
        return self.progress.steps if self._loaded_steps is None else self._loaded_steps

    # ---- while backward goes on

    def _complete(self, parameter: torch.nn.Parameter) -> None:
        index = self._lane_of.get(parameter)
        if index is None or not self.overlaps or not self._is_here():
            return
        if self.samples.count == 0:
            return  # what weighs nothing is overwritten; not before it is sure that it does
        self._awaited[index].discard(parameter)
        if self._awaited[index] or index == len(self.lanes) - 1:
            return
        if self._round is not None and index in self._round.operations:
            return
        self._make_dense()
        if self._turned_sparse(index):
            return  # `reduce` plans anew
        if self._round is None:
            self._round = self._open()
        self._round.submit_early(index)

    def _is_here(self) -> bool:
        """Tell whether this is still the world that was entered; `reduce` enters another."""
        return world.is_initialized() and world.current() is self._world

    def stand_in(self, index: int) -> Work:
        """Return what this rank, which has joined, does of a lane in the others' round."""
        if index >= len(self.lanes):
            raise RuntimeError(
                f"{self.name} has no lane {index} on rank {self.ranks[self.rank]}, which has "
                "joined: every rank must take a step before one joins"
            )
        ghost = self._ghost
        if ghost is None or index in ghost.stood_in:
            ghost = self._open()
        self._ghost = ghost
        reduce = ghost.stand_in(index)

        def work(transport: Transport, votes: list[int]) -> None:
            self.progress.steps += reduce(transport, votes)
            self._world.hear(ghost.told)

        return work

    def _await_all(self) -> None:
        self._awaited = [set(lane.parameters) for lane in self.lanes]

    def _stop_overlapping(self, why: str) -> None:
        if self.overlaps:
            self.overlaps = False
            hides = hides_behind_backward(self.options.compression)
            _log.log(
                logging.WARNING if hides else logging.INFO,
                "rank %d: %s: from now on %s are exchanged after backward, without overlap%s; "
                "change them between synchronize() and step() to have it back%s",
                self.ranks[self.rank],
                why,
                self.name,
                ", and hide_behind_backward=True hides nothing" if hides else "",
                ", or give density= or bytes_per_step=" if hides else "",
                extra=EVERYWHERE,
            )

    def _make_dense(self) -> None:
        if self.options.sparse_as_dense:
            for parameter in with_gradients(self._param_groups):  # empty ones, too
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()

    def _open(self) -> Round:
        if self._ghost is not None:
            for lane in self.lanes:
                lane.undo()  # where it came to no end
            self._ghost = None
        weight = 1.0 / self._size if self.options.op == Average else 1.0
        loss = loss_scale(self.scaler)
        clip = LocalClip([p.grad for p in self.trained()], self.options.local_clip_norm, loss)
        return Round(
            self.lanes,
            self._engine,
            self._facts,
            self.samples,
            missing_is_zero=self.options.missing_gradients == "zeros",
            weight=weight,
            share=1.0 / self._size,
            scale=self.options.gradient_predivide_factor * loss,
            clip=clip,
        )

    # ---- the plan

    def _has_unplanned(self) -> bool:
        trained = self.trained()
        if self._loaded_steps is not None:
            return True
        gone = self._lane_of.keys() - set(trained)  # frozen, or taken out of the groups
        if any(self._holds_back(parameter) for parameter in gone):
            return True  # what is held back of it waits until it is there again
        for parameter in trained:
            if parameter.grad is None:
                continue
            index = self._lane_of.get(parameter)
            if index is None:
                return True
            if parameter.grad.is_sparse and isinstance(self.lanes[index], Lane):
                return True
        return False

    def _turned_sparse(self, index: int) -> bool:
        lane = self.lanes[index]
        gradients = [p.grad for p in lane.parameters if p.grad is not None]
        return isinstance(lane, Lane) and any(g.is_sparse for g in gradients)

    def _holds_back(self, parameter: torch.nn.Parameter) -> bool:
        return has_room(self.lanes[self._lane_of[parameter]])

    def _plan(self, order: Sequence[torch.nn.Parameter]) -> None:
        """Make the lanes, the same on every rank."""
        trained = self.trained()
        self.names.add(self._param_groups)
        sparse = [
            self.names[p]
            for p in trained
            if (p.grad is not None and p.grad.is_sparse) or p in self._sparse()
        ]
        names = [self.names[p] for p in trained]
        held = {**self._held, **take_out(self.lanes)}
        plan = Plan(
            self.options, trained, names, order, sparse, self._wanted, self.steps, unsent(held)
        )
        facts = plan.facts()
        agreed = self._agree_on(plan, facts)
        self.progress.steps = agreed.steps
        self.lanes = plan.open_lanes(agreed, self.name, self.progress)
        put_in(self.lanes, held)
        records = {tuple(record["names"]): record for record in agreed.records}
        for lane in self.lanes:
            if tuple(lane.names) in records:
                lane.resume(records[tuple(lane.names)])
        self._wanted, self._loaded_steps = [], None
        self._held = {name: parts for name, parts in held.items() if name not in names}
        self._warn_of_strangers()
        self._lane_of = {p: i for i, lane in enumerate(self.lanes) for p in lane.parameters}
        self._await_all()
        said = "\n".join([*facts, *map(str, agreed.parts)])
        self._facts = f"plan {hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"
        if self._size > 1:
            self.hooks.watch(trained)
        self._warn_of_nothing_to_hide_behind()
        self._advise()

    def _warn_of_nothing_to_hide_behind(self) -> None:
        hides = hides_behind_backward(self.options.compression)
        if hides and self.overlaps and len(self.lanes) == 1 and self._size > 1:
            _log.warning(
                "rank %d: %s are exchanged in one bucket, when backward has ended, and "
                "hide_behind_backward=True hides nothing; make several by a smaller bucket_bytes=, "
                "or give density= or bytes_per_step=",
                self.ranks[self.rank],
                self.name,
                extra=EVERYWHERE,
            )

    def _warn_of_strangers(self) -> None:
        """Warn of what is held back of names that no parameter has; it stays, and is saved."""
        news = {name: parts for name, parts in self._held.items() if name not in self._strangers}
        self._strangers |= strangers(
            news,
            self.names.known(),
            self.ranks[self.rank],
            "the optimizer has no parameter of that name; give it the names that the checkpoint "
            "was saved with (named_parameters)",
        ).keys()

    def _advise(self) -> None:
        """Expect what the exchange will take; rank 0 says, once in a world, what compressing saves.

        Where all ranks want it; ranks that are threads of one process have no links to speak of.
        """
        everyone = self._size == self._world.size > 1
        if not everyone or self._world.transport.name == "local":
            return

        def calibrate(transport: Transport, votes: list[int]) -> Calibration | None:
            return calibration_of(transport) if all(votes) else None

        name, wanted = f"{self.name}.advice", advice.wanted()
        calibration = self._engine.submit(name, [], calibrate, vote=wanted).wait()
        if calibration is None:
            return
        self._predicted_seconds = expected_seconds(self.lanes, calibration)
        if self.rank == 0 and not self._world.advised:
            self._world.advised = True
            elements = sum(lane.elements for lane in self.lanes)
            _log.info("%s", advice.advice(self.options.compression, elements, calibration))

    @property
    def predicted_seconds(self) -> float | None:
        """Return what a step's exchange is expected to take, where that is known.

        While the density is on its way to what was asked for, it is not.
        """
        warming = getattr(self.options.compression, "warmup_steps", 0) > self.progress.steps
        return None if warming else self._predicted_seconds

    def _agree_on(self, plan: Plan, facts: Sequence[str]) -> Agreed:
        """Return what all ranks plan; an error, on all alike, where one of them has joined."""

        def agree(transport: Transport, votes: list[int]) -> Agreed:
            if joined := [rank for rank, there in zip(self.ranks, votes, strict=True) if not there]:
                raise MismatchError(
                    f"all ranks plan {self.name} together, and {name_ranks(joined)} joined: every "
                    "rank must take a step before one joins, and a parameter that comes or is "
                    "unfrozen later must wait until all have joined"
                )
            return plan.agree(transport)

        operation = self._engine.submit(f"{self.name}.plan", facts, agree, vote=1, recipe=_LEFT_OUT)
        agreed: Agreed = operation.wait()
        return agreed

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        """Look the groups up: a state that is loaded brings others."""
        return self._optimizer.param_groups

    def _sparse(self) -> set[torch.nn.Parameter]:
        """Return the parameters whose gradients were sparse on some rank."""
        return {lane.parameters[0] for lane in self.lanes if isinstance(lane, SparseGradientLane)}
