"""Rounds of mode "abs": their settings, their batches, and their operations between ranks.

AgreedSettings: all ranks apply a round with the same learning rates and other settings.

    round         |--- 5 ---|--- 6 ---|   a schedule that follows loader.round
    rank 0 steps  | o  o  o | o  o  o |   its script has seen round 6, and sets the rates for all
    rank 1 steps  | o     o .  nothing    has nothing left to compute, so it has not seen round 6

The ranks that have seen the newest round therefore set all numbers of the optimizer's groups, since
schedules change momentum and betas, too. These ranks must agree.

Rounds: delayed synchronous steps; a round's batch grows until the reduction before is finished.

ABS-SGD (Zhou, Chen and Wu 2023, arXiv 2308.15164), as far as its abstract describes it; x_t are the
parameters in round t, S_t the update from its gradients:

    compute  |-- round 0 at x_0 --|---- round 1 at x_1 ----|---- round 2 at x_2 ----|
    wire                          |==== reduce S_0 ====|   |== reduce S_1 ==|
    apply                       x_1 = x_0            x_2 = x_1 - S_0          x_3 = x_2 - S_1

In a round a rank adds up the gradients of micro-batches, all at the same parameters. When the next
micro-batch will complete its share of the least batch, it announces that it is ready, and continues
computing. When all ranks are ready and the reduction before is finished, it ends the round after
the current micro-batch. So the delay is exactly one round, every replica makes the same steps, and
no rank waits.

With one step of delay, gradient descent on a curvature of lambda is stable for lr * lambda below
1 - momentum; without delay, below 2 (1 + momentum).

RoundWire: the engine's operations in which all ranks take part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import torch

from collectives.errors import MismatchError
from collectives.transports import Transport

from ...exchange.buckets.parameters import describe_parameter
from ...optim.step_checks import Divergence, ReplicaCheck
from ...runtime.coordinator import Work
from ...runtime.coordinator.agreement import describe_mismatch
from ...runtime.world.membership import World
from ..local_steps import LocalSteps, TimedOperation
from ..replica import RoundExchange


class AgreedSettings:
    """One rank's settings, and the agreed settings of the round that was reduced last.

    seen: the newest round for which this rank's script may have changed its settings.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._agreed: list[list[Any]] = []  # number of the group, name, value
        self.seen = 0

    def encode(self) -> list[Any]:
        """Return the newest round that this rank has seen, and its settings, to gather."""
        own = [
            [number, name, value]
            for number, group in enumerate(self._optimizer.param_groups)
            for name, own in group.items()
            if name != "params" and (value := _number(own)) is not None
        ]
        return [self.seen, own]

    def agree(self, transport: Transport, own_settings: list[Any]) -> None:
        """Adopt the settings of the ranks that have seen the newest round.

        Raises MismatchError, on all ranks, if these ranks' settings differ.
        """
        all_settings = transport.gather_object(own_settings)
        # A rank with nothing left to compute is behind: its settings belong to an earlier round.
        newest = max(seen for seen, _ in all_settings)
        by_rank = {rank: each for rank, (seen, each) in enumerate(all_settings) if seen == newest}
        # As texts: a rate of 1 differs from 1.0, and NaN equals NaN.
        if len(set(map(repr, by_rank.values()))) > 1:
            signature = {
                rank: [
                    "the settings of a round",
                    *(f"{name}={value} of group {number}" for number, name, value in settings),
                ]
                for rank, settings in by_rank.items()
            }
            raise MismatchError(
                f"{describe_mismatch(signature)}. In mode 'abs' ranks have different numbers of "
                "micro-batches: step a schedule with the rounds, by `while scheduler.last_epoch < "
                "loader.round: scheduler.step()` after optimizer.step(), or once an epoch"
            )
        self._agreed = by_rank[min(by_rank)]

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set the agreed settings in the optimizer within this context."""
        before = []
        for number, name, value in self._agreed:
            group = self._optimizer.param_groups[number]
            own = group[name]
            if _number(own) != value:
                group[name] = _as_type_of(own, value)
                before.append((group, name, own, group[name]))
        try:
            yield
        finally:
            for group, name, own, agreed in before:
                if group[name] is agreed:  # some optimizers advance counters in their groups
                    group[name] = own


def _number(own: object) -> Any:
    """Return a number, or a list of numbers, for JSON; None for anything else."""
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return float(own)
    # To Python a bool is an int, but it is a switch: no schedule changes it.
    if isinstance(own, int | float) and not isinstance(own, bool):
        return own
    if isinstance(own, tuple | list):
        numbers = [_number(each) for each in own]
        return None if None in numbers else numbers
    return None


def _as_type_of(own: Any, value: Any) -> Any:
    if isinstance(own, torch.Tensor):
        return torch.full_like(own, value)
    if isinstance(own, tuple):
        return tuple(_as_type_of(each, number) for each, number in zip(own, value, strict=True))
    return value


class Pending(Protocol):
    """A pending operation of all ranks."""

    @property
    def done(self) -> bool:
        """Tell whether `wait` would return at once."""

    def wait(self) -> Any:
        """Return the result."""


class RoundReduction(NamedTuple):
    """A round's outcome, the same on every rank.

    update: by parameter, None if no rank has a gradient for it; None for all if a gradient was
        not finite or no rank had samples.
    samples, batches: of each rank in that round.
    culprits: the ranks with gradients that were not finite.
    """

    update: Sequence[torch.Tensor | None] | None
    samples: list[int]
    batches: list[int]
    culprits: Sequence[int] = ()


class Wire(Protocol):
    """The operations of all ranks; neither call waits."""

    def ready(self, is_last: bool) -> Pending:
        """Announce that this rank may end the round; result: whether a rank has nothing left."""

    def reduce(self, sums: list[torch.Tensor | None], samples: int, batches: int) -> Pending:
        """Reduce the sums to the mean over all ranks' samples; the result is a RoundReduction."""


class Rounds:
    """One rank's rounds: call `add` and `poll` for each micro-batch, and `finish` at the end.

    least_samples: of all ranks in a round; each rank's share is as in the last known round.
    number: of the open round; after the last round (`ended`) still its number, until `begin`.
    ended:  whether a rank had nothing left, so that the round is the last until `begin`.
    batches: micro-batches that each rank has computed since `begin`, as far as is known.
    samples: of each rank in the last known round that was not cut short.
    skipped: rounds that were not applied, because a gradient was not finite.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        wire: Wire,
        rank: int,
        ranks: int,
        least_samples: int,
        apply: Callable[[int], None],
        skip: Callable[[Sequence[int]], None] = lambda culprits: None,
    ) -> None:
        """apply: takes a step with the parameters' gradients, given their number of samples; skip:
        is called for a round that is not applied, with the ranks whose gradients were not finite.
        """
        self._parameters = list(parameters)
        self._wire = wire
        self._rank = rank
        self._least_samples = least_samples
        self._apply = apply
        self._skip = skip
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._samples = self._batches = self._next_samples = 0
        self._ready: Pending | None = None
        self._reducing: Pending | None = None
        self._is_abandoned = False
        self.number = 0
        self.skipped = 0
        self.ended = False
        self.batches = [0] * ranks
        # Until a round is known, each rank must bring an equal share of the least batch.
        self.samples = [1] * ranks

    @property
    def is_drained(self) -> bool:
        """Tell whether all computed gradients have been applied to the parameters."""
        return self._reducing is None and not self._samples

    @property
    def waits_for(self) -> Pending | None:
        """Return the operation that a rank with nothing to compute must wait for, if any."""
        pending = (self._reducing, self._ready)
        return next((each for each in pending if each is not None and not each.done), None)

    def load(self, number: int, samples: Sequence[int]) -> None:
        """Resume at a round, with the ranks' samples in the last one if there are equally many."""
        self.number, self.ended = number, False
        if len(samples) == len(self.samples):
            self.samples = list(samples)

    def begin(self) -> None:
        """Open the next round after the last one has ended."""
        self.number += self.ended
        self.ended = False
        self.batches = [0] * len(self.batches)

    def add(self, samples: int, summed: bool, loss_scale: float = 1.0) -> None:
        """Add a micro-batch's gradients, of a mean or a sum over samples; they become None.

        Gradients in 16 bits are added up in float32: sums over samples exceed the range of their
        dtype.
        loss_scale: the factor of the loss; gradients are divided by it.
        """
        # Sums over samples add up for micro-batches of any size; means do not.
        scale = (1 if summed else samples) / loss_scale
        for place, parameter in enumerate(self._parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if gradient.dtype in (torch.float16, torch.bfloat16):
                gradient = gradient.float()
            if (total := self._sums[place]) is None:
                # Reuse its memory without a copy: the parameter has released it.
                self._sums[place] = gradient.detach().mul_(scale)
            else:
                total.add_(gradient.detach(), alpha=scale)
        self._samples += samples
        self._next_samples = samples  # the next micro-batch has the same size, or the epoch ends
        self._batches += 1

    def leave_out(self) -> None:
        """Count a micro-batch without its gradients and samples."""
        self._batches += 1

    def abandon(self) -> None:
        """Discard all gradients not yet applied; all ranks call it, and then `finish`."""
        self._is_abandoned = True
        # A sum that is not finite makes all ranks skip the round, even those that have sent theirs.
        self._sums = [None] * len(self._parameters)
        self._sums[0] = torch.full_like(self._parameters[0], math.nan)

    def finish(self) -> None:
        """End the last round with all ranks, when nothing is left to compute; apply its update."""
        while not self.ended:
            self.poll(is_last=True)
            if not self.ended and self.waits_for is not None:
                self.waits_for.wait()
        self.drain()

    def poll(self, is_last: bool = False) -> None:
        """Advance the round as far as possible without waiting; call it between micro-batches.

        is_last: this rank has nothing left to compute.
        """
        if self.ended:
            return
        waits = self.waits_for is not None
        if self._reducing is not None and self._reducing.done:
            self._reducing.wait()  # raises its own error before one of a rank that left later
        if self._ready is None:
            # A later call of `poll` ends the round, so it will include one more micro-batch.
            samples_at_end = self._samples + (0 if is_last else self._next_samples)
            # Shares from the last round: fast ranks delay `ready` until they have done more.
            share = self.samples[self._rank] / sum(self.samples)
            if is_last or samples_at_end >= share * self._least_samples:
                self._ready = self._wire.ready(is_last)
            return
        if waits:
            return
        # Either all ranks have their shares, which sum to the least batch, or one has nothing left.
        is_any_last: bool = self._ready.wait()
        self._ready = None
        self._end_round()
        self.ended = is_any_last
        self.number += not is_any_last

    def _end_round(self) -> None:
        """Apply the round before, and start to reduce this one."""
        # The exchange has one bucket and one residual, so the reduction before must be over.
        self.drain()
        self._reducing = self._wire.reduce(self._sums, self._samples, self._batches)
        # The exchange has copied the sums; the next round starts new ones.
        self._sums = [None] * len(self._parameters)
        self._samples = self._batches = 0

    def drain(self) -> None:
        """Apply the update of the last round that has ended, if any; wait for its reduction."""
        if self._reducing is None:
            return
        reduced: RoundReduction = self._reducing.wait()
        self._reducing = None
        if self._is_abandoned:
            return
        self.batches = [a + b for a, b in zip(self.batches, reduced.batches, strict=True)]
        total = sum(reduced.samples)
        # A round that was cut short at the end of a pass says nothing about the ranks' speeds.
        if total > 0 and not self.ended:
            self.samples = list(reduced.samples)
        if reduced.update is None:
            if total > 0:
                self.skipped += 1
                self._skip(reduced.culprits)
        else:
            for parameter, update in zip(self._parameters, reduced.update, strict=True):
                parameter.grad = None if update is None else update.to(parameter.dtype)
            self._apply(total)
            for parameter in self._parameters:
                parameter.grad = None


# Flags of a reduction; counts follow in the higher bits. They travel with the agreement on the
# operation, so they need no message of their own.
_FINITE: Final = 1  # this rank's sums are finite
_MISSES: Final = 2  # some of its parameters have no gradient
_COMPARES: Final = 4  # it checks its replica; not set if it has loaded a state in this round
_FLAGS: Final = 3  # bits
_COUNT_BITS: Final = 31
_COUNTS: Final = (1 << _COUNT_BITS) - 1


class RoundWire:
    """One rank's side of the operations between ranks.

    settings: all ranks agree on them in every round.
    steps: counts the costs of the rounds.
    """

    def __init__(
        self,
        name: str,
        exchange: RoundExchange,
        world: World,
        optimizer: Any,
        settings: AgreedSettings,
        steps: LocalSteps,
    ) -> None:
        self.exchange, self._name, self._engine = exchange, name, world.engine
        self._settings, self._steps, policy = settings, steps, optimizer.step_policy
        self._signature = [
            describe_parameter(policy.names[p], p) for p in exchange.bucket_exchange.parameters
        ]
        # Checked together with a round when due, so that no rank waits for the check alone.
        self._replicas: ReplicaCheck = policy.replicas
        # Each rank's part of an update is clipped to its share of this norm.
        self._local_clip_norm = policy.options.local_clip_norm
        self.samples = 0  # of this rank, in the round being reduced
        self.divergences: list[Divergence] | None = None  # found when it began; None: not checked

    def ready(self, is_last: bool) -> TimedOperation:
        """Announce that this rank may end the round."""
        return self._submit("ready", [], lambda transport, all_flags: any(all_flags), int(is_last))

    def reduce(self, sums: list[torch.Tensor | None], samples: int, batches: int) -> TimedOperation:
        """Reduce the sums of a round to their mean."""
        finite = self.exchange.capture_sums(sums, self._local_clip_norm)
        missing = [str(place) for place, each in enumerate(sums) if each is None]
        # Read now: `work` runs on the engine's thread, while the script may change both.
        settings, compare, self.divergences = self._settings.encode(), self._replicas.begin(), None

        def work(transport: Transport, all_flags: list[int]) -> RoundReduction:
            counts = [flags >> _FLAGS & _COUNTS for flags in all_flags]
            done = [flags >> _FLAGS + _COUNT_BITS for flags in all_flags]
            culprits = [rank for rank, flags in enumerate(all_flags) if not flags & _FINITE]
            update: Sequence[torch.Tensor | None] | None = None
            # This and the conditions below depend on all ranks' flags, so all ranks check, agree
            # and gather together.
            if any(counts) and not culprits:
                if compare is not None and all(flags & _COMPARES for flags in all_flags):
                    self.divergences = compare(transport)
                self._settings.agree(transport, settings)
                missing_on_all: set[str] = set()
                # A gradient on one rank is enough for all ranks, so gather names only if each rank
                # misses some.
                if all(flags & _MISSES for flags in all_flags):
                    missing_on_all = set.intersection(*map(set, transport.gather_object(missing)))
                total = sum(counts)
                update = self.exchange.reduce(transport, 1.0 / total, samples / total)
                if update is not None and missing_on_all:
                    # The optimizer skips gradients of None. Read on the stream that writes them.
                    with self.exchange.bucket_exchange.bucket.on_stream():
                        update = [
                            None if str(place) in missing_on_all and not bool(each.any()) else each
                            for place, each in enumerate(update)
                        ]
            return RoundReduction(update, counts, done, culprits)

        # The round's own computing ends here; later time belongs to the next round.
        self._steps.computed()
        self.samples = samples
        return self._submit(
            "gradients",
            [self.exchange.signature, *self._signature],
            work,
            (_FINITE if finite else 0)
            | (_MISSES if missing else 0)
            | (_COMPARES if compare is not None else 0)
            | samples << _FLAGS
            | batches << _FLAGS + _COUNT_BITS,
        )

    def gather_drains(self, signature: Sequence[str], drains: bool) -> list[int]:
        """Return for every rank whether it drains; wait for all of them."""
        drain_flags: list[int] = self._submit(
            "pass", signature, lambda transport, all_flags: list(all_flags), int(drains)
        ).wait()
        return drain_flags

    def _submit(
        self, suffix: str, signature: Sequence[str], work: Work, flags: int
    ) -> TimedOperation:
        operation = self._engine.submit(f"{self._name}.{suffix}", signature, work, flags=flags)
        return self._steps.note_submit(operation)
