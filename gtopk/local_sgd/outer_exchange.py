"""OuterExchange: the changes of the ranks' replicas in a round, reduced to one gradient for all.

    gradients   of this rank's last step | z - x_i | as before | S in the outer step | as before
                                         ^ begin   ^           ^ ended               ^ released

z: the center that all ranks began the round from; x_i: this rank's replica; S: the sum of the
changes that were sent, weighted by the steps that each rank has made, the same on every rank. The
rest stays in the residual; if the sum does not count, the residual is restored to the bit. The
parameters are those of the whole model, or of one fragment with its own exchange.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from collectives.transports import Transport

from ..errors import HorovodInternalError
from ..exchange.bucket_exchange import BucketExchange, open_bucket_exchange
from ..exchange.buckets.parameters import describe_parameter
from ..exchange.exchange import Exchanged, Progress
from ..exchange.residual_state import (
    ResidualState,
    copy_residuals,
    load_residuals,
    nonzero_names,
    validate_residuals,
)
from ..optim.expected_step import ExpectedStep
from ..optim.options import signature_of
from ..optim.peers import Peers
from ..optim.step_checks import (
    BUFFERS_KEPT,
    Comparison,
    Divergence,
    ReplicaCheck,
    SkipCounter,
    checksums,
    name_culprits,
    require_the_same,
)
from ..runtime.coordinator import Operation
from ..runtime.coordinator.agreement import name_ranks
from ..runtime.world.membership import World
from ..runtime.world.process_sets import ProcessSet
from ..telemetry.run_record import note_step
from ..telemetry.step_report import RecordedStep, StepReport, report

_log = logging.getLogger("gtopk")

# Flags, below the number of steps: this rank's replica is finite; it has received SIGTERM; some of
# its parameters are frozen and unchanged.
_FINITE, _PREEMPTED, _FROZEN = 1, 2, 4
_STEPS_SHIFT: Final = 3


Bounds = tuple[float, float]  # from, to; from time.perf_counter


class OuterResult(NamedTuple):
    """The result of an exchange, the same on every rank, except for its seconds and bytes.

    preempted: the ranks that have received SIGTERM.
    lost:      by rank, its parameters that are not finite; only ranks with such parameters.
    frozen:    the parameters that every rank has frozen, and none has changed in the round.
    exchanged: None: nothing was exchanged, because no rank with a finite replica has made a step.
    span:      begin and end on the engine's thread, from time.perf_counter.
    """

    preempted: list[int]
    lost: dict[int, list[str]]
    frozen: set[str]
    exchanged: Exchanged | None
    operation: Operation
    span: Bounds

    @property
    def moves(self) -> bool:
        """Tell whether the outer optimizer has a sum to step with."""
        return self.exchanged is not None and self.exchanged.finite

    @property
    def empty(self) -> bool:
        """Tell whether no rank has made a step or lost its replica."""
        return self.exchanged is None and not self.lost

    @property
    def overflowed(self) -> bool:
        """Tell whether the sum is not finite."""
        return self.exchanged is not None and not self.exchanged.finite


@dataclass
class Round:
    """A round that is over, and has not moved the replica yet.

    steps:   made by this rank in it; counted: the part of them that counts.
    early:   by how many steps it was shorter than others.
    turn:    the turn in its exchange's name; -1: its exchange was before a checkpoint.
    covered: the steps in its report: all since the last end of any fragment's round.
    sent:    the replica that is exchanged; empty if the rank waits for the changes.
    options: of the outer optimizer, when the round was over.
    waits:   the spans in which the program waited for it.
    is_lost: this rank's replica was not finite, and has not been reset to the center yet.
    reset_ranks: ranks reset since, for another fragment; their loss has been counted.
    outcome: None: not known yet, or it came before a checkpoint.
    error:   why the exchange has failed.
    """

    steps: int = 0
    counted: int = 0
    early: int = 0
    turn: int = -1
    covered: int = 0
    sent: Sequence[torch.Tensor] = ()
    options: Sequence[Mapping[str, Any]] = ()
    waits: list[Bounds] = field(default_factory=list)
    is_lost: bool = False
    is_loaded: bool = False
    reset_ranks: set[int] = field(default_factory=set)
    outcome: OuterResult | None = None
    error: HorovodInternalError | None = None

    @property
    def has_ended(self) -> bool:
        """Tell whether its exchange has ended."""
        return self.is_loaded or self.outcome is not None or self.error is not None

    @property
    def waited(self) -> float:
        return sum(ended - begun for begun, ended in self.waits)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waits.append((begun, time.perf_counter()))


class LostReplicas(SkipCounter):
    """Counts replicas of all ranks that were not finite and were replaced with the others'.

    Raises if too many outer steps in a row have such replicas, or a sum that is not finite.
    """

    def note(self, rank: int, step: int, lost: Mapping[int, Sequence[str]], moved: bool) -> None:
        """Count replicas that are not finite, and log a warning on every rank.

        lost:  by rank, the parameters that are not finite; empty: only the replicas' sum is not.
        moved: whether the outer step has changed the model, using the others' replicas.
        Raises FloatingPointError after more such outer steps in a row than allowed.
        """
        # Before `lengthen`, which may raise: the count must include the last ones.
        self.count += len(lost)
        where = f"a replica is not finite on {name_culprits(lost)}"
        why = where if lost else "the sum of replicas overflowed"
        _log.warning(
            "rank %d: outer step %d %s: %s",
            rank,
            step,
            f"goes on without {name_ranks(list(lost))}" if moved else "changes nothing",
            f"{why}; {BUFFERS_KEPT}" if moved else why,
        )
        self.lengthen(
            lambda n: (
                f"rank {rank}: {n} outer steps in a row were without some replicas, the last, "
                f"number {step}, because {why}"
            )
        )


def options_of(outer: torch.optim.Optimizer) -> str:
    """Return the outer optimizer's class and options; they must be equal on all ranks."""
    options = [
        # As floats, so that rates of 1 and 1.0 are equal.
        {name: float(value) if type(value) is int else value for name, value in group.items()}
        for group in options_by_group(outer)
    ]
    return f"outer {type(outer).__name__} {options}"


def options_by_group(outer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in outer.param_groups
    ]


def state_of(outer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> str:
    """Return a text of the outer optimizer's state, with which ranks check that it is equal."""
    # By parameter: `outer.state` is in the order in which it was filled.
    state = [value for p in parameters for value in outer.state.get(p, {}).values()]
    tensors = checksums([value for value in state if isinstance(value, torch.Tensor)])
    others = [value for value in state if isinstance(value, (int, float))]
    return (
        f"state of the outer optimizer {zlib.crc32(tensors.tobytes()):08x} {others} "
        "(load it on all ranks, or on one and call broadcast_optimizer_state)"
    )


@contextmanager
def preserve_gradients(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Restore the parameters' current gradients at the end of the context."""
    gradients = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


class OuterExchange:
    """Exchanges one rank's changes of the model, and keeps its residual.

    In each world call `agree` first; then, in each round, `begin` and `ended`.

    names: of the parameters, in the order in which they are exchanged.
    residual_decay: multiplies the residual before a round's changes are added to it.
    budget_share: share of all fragments' elements, and so of the budget of `Compression.auto`.
    name:  prefix of its operations' names. peers: the ranks that exchange.
    expected: the expected seconds of an exchange; known after `agree`.
    """

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        name: str,
        compression: Any,
        process_set: ProcessSet,
        here: World,
        residual_decay: float,
        budget_share: float,
    ) -> None:
        self._names = names
        self._compression = compression
        self._residual_decay = residual_decay
        self._process_set = process_set
        self._budget_share = budget_share
        self.progress = Progress()
        self.expected = ExpectedStep(compression, self.progress, "outer step")
        self.names: dict[torch.Tensor, str] = {}  # of the center, for the check
        self._check = ReplicaCheck(self, None, None)
        self._compare: Comparison | None = None
        self._diverged: list[Divergence] | None = None
        self._running: Operation | None = None
        self._span: Bounds = (0.0, 0.0)
        self._enter(here, name, {})

    def enter(self, here: World, name: str) -> None:
        """Enter the next world, after `shutdown` or a failure; call `agree` before an exchange."""
        # Taken out first: the residual of the new bucket starts empty.
        self._enter(here, name, self._copy_residuals())

    def _enter(self, here: World, name: str, residuals: Mapping[str, ResidualState]) -> None:
        group = self._process_set
        self.peers = Peers(here, group.engine, name, group.members.ranks, takes_part=True)
        self._bucket_exchange: BucketExchange = open_bucket_exchange(
            name,
            list(self._names),
            list(self._names.values()),
            self._compression,
            self.progress,
            self._budget_share,
        )
        self._put_residuals(residuals)

    def _put_residuals(self, residuals: Mapping[str, ResidualState]) -> None:
        load_residuals([self._bucket_exchange], residuals)
        # Residuals that do not fit into the bucket, until the ranks agree to send them along.
        self._residuals = {} if self._bucket_exchange.has_residual else dict(residuals)

    def _copy_residuals(self) -> dict[str, ResidualState]:
        """Return the residual by parameter name."""
        return {**self._residuals, **copy_residuals([self._bucket_exchange])}

    def agree(
        self, center: Sequence[torch.Tensor], signature: Sequence[str], outer_steps: int
    ) -> int:
        """Check that all ranks have the same model, and agree to send loaded residuals along.

        All continue with the first rank's steps and bucket record, because others may have loaded
        nothing. Returns the first rank's outer steps.
        signature: other words that must be equal on all ranks.
        """
        sums, names = checksums(center), list(self._names.values())
        own_progress = [outer_steps, self.progress.steps, self._bucket_exchange.record()]

        def compare_models(transport: Transport, all_flags: list[int]) -> tuple[bool, Any]:
            require_the_same(transport, sums, names)
            return any(all_flags), transport.broadcast_object(own_progress)

        any_unsent, first_progress = self.peers.run(
            "replicas",
            self._signature([*signature, signature_of(self._compression)]),
            compare_models,
            flags=bool(nonzero_names(self._residuals)),
        )
        outer_steps, self.progress.steps, record = first_progress
        self._bucket_exchange.resume(record)
        # On all ranks, even those that have loaded nothing: it changes how the bucket is exchanged.
        if any_unsent:
            self._bucket_exchange.start_draining()
            load_residuals([self._bucket_exchange], self._residuals)
        self._residuals = {}
        if (residual := self._bucket_exchange.exchange.residual) is not None:
            residual.may_be_misplaced = True  # any rank may have loaded a state
        self.expected.measure([self._bucket_exchange], self.peers)
        return outer_steps

    def _signature(self, signature: Sequence[str]) -> list[str]:
        return [*signature, *(describe_parameter(name, p) for p, name in self._names.items())]

    def begin(
        self,
        name: str,
        center: Sequence[torch.Tensor],
        signature: Sequence[str],
        steps: int,
        preempted: bool,
    ) -> None:
        """Start to reduce this replica's changes since the center on the engine, until `ended`.

        The replica may change meanwhile: the changes are copies.
        name: of the operation.
        center: compared with the other ranks' after the first outer step, and every 100.
        signature: as in `agree`.
        steps: how many this rank has made in the round.
        preempted: this rank has received SIGTERM.
        """
        bucket_exchange = self._bucket_exchange
        self.names = dict(zip(center, self._names.values(), strict=True))
        self._check.await_step(updates=self.progress.steps > 0)
        self._compare, self.names = self._check.begin(), {}
        if self._compare is not None:
            signature = [*signature, "models are compared"]
        # z - x, the sign of a gradient: the outer optimizer subtracts it.
        changes = torch._foreach_sub(list(center), [p.detach() for p in self._names])
        frozen = [
            name
            for (parameter, name), change in zip(self._names.items(), changes, strict=True)
            if not parameter.requires_grad and not bool(change.any())
        ]
        # Unweighted: the shares depend on all ranks' steps, which only `_work` knows.
        bucket_exchange.capture_gradients(1.0, 1.0, changes)
        own_lost = [] if bucket_exchange.all_finite() else bucket_exchange.not_finite()
        if own_lost:
            torch._foreach_zero_(changes)  # a weight of 0 is not enough: 0 times NaN is NaN
        try:
            # A lost replica announces no steps, so its weight in the sum is zero.
            self._running = self.peers.engine.submit(
                name,
                self._signature([*signature, bucket_exchange.signature]),
                partial(self._work, own_lost, frozen),
                flags=(0 if own_lost else steps << _STEPS_SHIFT | _FINITE)
                | (_PREEMPTED if preempted else 0)
                | (_FROZEN if frozen else 0),
            )
        except BaseException:
            bucket_exchange.release_gradients()
            raise

    @contextmanager
    def ended(self) -> Iterator[OuterResult]:
        """Wait for the exchange of `begin`; within the context the gradients are S, if it counts.

        A frozen parameter has no gradient if S is zero: outer momentum must not move it.
        Raises HorovodInternalError, on every rank, if the ranks disagree or one is gone; the
        residual is then restored.
        """
        assert self._running is not None
        # Cleared first: if the wait fails, it must not be repeated.
        operation, self._running = self._running, None
        bucket_exchange = self._bucket_exchange
        try:
            with preserve_gradients(bucket_exchange.parameters):
                preempted, lost, frozen, exchanged = operation.wait()
                self._check.end(self._diverged, {})
                outcome = OuterResult(preempted, lost, frozen, exchanged, operation, self._span)
                if outcome.moves:
                    bucket_exchange.apply_sum()
                    # The sum has replaced the changes.
                    sums = zip(self._names.items(), bucket_exchange.bucket.gradients, strict=True)
                    for (parameter, name), gradient in sums:
                        is_unchanged = name in frozen and not bool(gradient.any())
                        parameter.grad = None if is_unchanged else gradient
                else:
                    bucket_exchange.undo()
                yield outcome
                # After the outer step: if that fails, the exchange is undone and does not count.
                bucket_exchange.commit()
                self.progress.steps += outcome.moves
        except BaseException:
            bucket_exchange.undo()
            raise
        finally:
            bucket_exchange.release_gradients()

    def _work(
        self, own_lost: list[str], frozen: list[str], transport: Transport, all_flags: list[int]
    ) -> tuple[list[int], dict[int, list[str]], set[str], Exchanged | None]:
        """Exchange on the engine's thread; return the first four fields of an `OuterResult`."""
        steps = [flags >> _STEPS_SHIFT for flags in all_flags]
        preempted = [
            transport.ranks[place] for place, flags in enumerate(all_flags) if flags & _PREEMPTED
        ]
        self._diverged = self._compare(transport) if self._compare is not None else None
        # All ranks' flags decide every branch below, so either all ranks gather or none does.
        lost: dict[int, list[str]] = {}
        if not all(flags & _FINITE for flags in all_flags):
            gathered = transport.gather_object(own_lost)
            lost = {
                rank: names for rank, names in zip(transport.ranks, gathered, strict=True) if names
            }
        if not any(steps):
            return preempted, lost, set(), None
        frozen_everywhere: set[str] = set()
        if all(flags & _FROZEN for flags in all_flags):
            frozen_everywhere = set.intersection(*map(set, transport.gather_object(frozen)))
        began = time.perf_counter()
        # Before the decay: if the sum does not count, `undo` restores the residual undecayed.
        self._bucket_exchange.snapshot()
        self._bucket_exchange.decay(self._residual_decay)
        share = steps[transport.rank] / sum(steps)
        self._bucket_exchange.set_weight(share, share)
        exchanged = self._bucket_exchange.reduce(transport)
        self._span = began, time.perf_counter()
        return preempted, lost, frozen_everywhere, exchanged

    def report(
        self,
        outcome: OuterResult,
        round: Round,
        step: int,
        compute_seconds: float,
        model_elements: int,
    ) -> StepReport:
        """Record the report of an outer step and return it.

        compute_seconds: of all steps of the round.
        model_elements: values of the parameters of all fragments.
        """
        recorded = RecordedStep([self._bucket_exchange], {0: outcome.operation})
        if outcome.exchanged is not None:
            recorded.exchanged[0] = outcome.exchanged
            recorded.spans.append(outcome.span)
        step_report = report(
            recorded,
            step=step,
            compute_seconds=compute_seconds,
            waits=round.waits,
            expected=self.expected,
            skipped=not outcome.moves,
            local_steps=round.covered,
            covers="outer step",
            model_elements=model_elements,
        )
        # With this fragment's residual only: others may be in use.
        steps = self.steps if outcome.moves else None
        note_step(self.peers.world, step_report, steps, recorded.bucket_exchanges)
        return step_report

    @property
    def steps(self) -> int:
        """Return how many exchanges have moved the model."""
        return self.progress.steps

    def parameter_names(self) -> Collection[str]:
        return set(self._bucket_exchange.names)

    def export_state(self) -> tuple[dict[str, ResidualState], dict[str, Any]]:
        """Return the residual of each parameter, and the bucket's record with its steps."""
        return self._copy_residuals(), {**self._bucket_exchange.record(), "steps": self.steps}

    def import_state(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None:
        """Replace the residual, and resume from the record's steps; `agree` before an exchange.

        steps: used if no record is of this bucket, or that record has none.
        Raises DamagedError for a tensor that does not fit the parameter of its name.
        """
        validate_residuals(residuals, {name: p for p, name in self._names.items()})
        own_names = self.parameter_names()
        self._put_residuals({name: parts for name, parts in residuals.items() if name in own_names})
        self.progress.steps = steps
        for record in records:
            if record["names"] == self._bucket_exchange.names:
                self._bucket_exchange.resume(record)
                self.progress.steps = record.get("steps", steps)
