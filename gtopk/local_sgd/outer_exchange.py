"""OuterExchange: what the ranks' replicas have changed in a round, reduced to one gradient for all.

    gradients   of this rank's last step | z - x_i | S, while the outer step is made | as before
                                         ^ take    ^ reduce, apply                   ^ let go

z: the center that all ranks began the round from; x_i: this rank's replica; S: the sum of what was
sent, weighed by the steps that each rank has made, and the same on every rank. What was not sent is
the residual; where the sum does not count, it is to the bit as it was before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import torch

from collectives.transports import Transport

from ..exchange.bucket_exchange import BucketExchange, open_bucket_exchange
from ..exchange.exchange import Exchanged, Progress
from ..exchange.residual import ResidualSize
from ..exchange.residual_names import unmatched
from ..exchange.residual_state import ResidualState, put_in, take_out, unsent
from ..optim.expected_step import ExpectedStep
from ..optim.options import signature_of
from ..optim.peers import Peers
from ..optim.replica_check import checksums, require_the_same
from ..optim.wrapped.checkpoint import CHANGES
from ..runtime.coordinator import Operation
from ..runtime.world.process_sets import ProcessSet
from ..runtime.world.state import World

# Of the flags, below the steps: this rank's replica is finite, it had SIGTERM, and some of its
# parameters are frozen and as they were.
_FINITE, _PREEMPTED, _FROZEN = 1, 2, 4
_STEPS_SHIFT: Final = 3


class Outcome(NamedTuple):
    """What an exchange came to, the same on every rank, but for what it cost.

    preempted: the ranks that had SIGTERM.
    lost:      by rank, the parameters that are not finite; of those ranks whose replica has some.
    frozen:    the parameters that every rank has frozen, and none has changed in the round.
    exchanged: None: there was nothing to exchange, as no rank has made a step that is not lost.
    """

    preempted: list[int]
    lost: dict[int, list[str]]
    frozen: set[str]
    exchanged: Exchanged | None
    operation: Operation

    @property
    def moves(self) -> bool:
        """Tell whether there is a sum to step with."""
        return self.exchanged is not None and self.exchanged.finite

    @property
    def empty(self) -> bool:
        """Tell whether no rank has made a step, and none is lost."""
        return self.exchanged is None and not self.lost

    @property
    def overflowed(self) -> bool:
        """Tell whether there is a sum, and it is not finite."""
        return self.exchanged is not None and not self.exchanged.finite


class OuterExchange:
    """One rank's part in it, with its residual.

    names: of the parameters, in the order in which they are exchanged.
    ranks: of the world that exchange, in order; rank: this one's place among them.
    expected: what an exchange is to take; known when all have met.
    """

    holds: ClassVar[str] = CHANGES

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        compression: Any,
        process_set: ProcessSet,
        here: World,
    ) -> None:
        self._names = names
        self._compression = compression
        self._process_set = process_set
        self._progress = Progress()
        self.expected = ExpectedStep(compression, self._progress, "outer step")
        self._unmatched: dict[
            str, ResidualState
        ] = {}  # of names that no parameter has; saved again
        self._enter(here, {})

    def enter(self, here: World) -> None:
        """Take part in the next world, after `shutdown` or a failure; `meet` before an exchange."""
        self._enter(here, self._take_out())

    def _enter(self, here: World, residuals: Mapping[str, ResidualState]) -> None:
        self._engine, self.ranks = self._process_set.engine, self._process_set.members.ranks
        self.rank = self.ranks.index(here.rank)
        self._name = f"local_sgd.{here.name_optimizer(self._names.values(), self.ranks)}"
        self._peers = Peers(here, self._engine, self._name, self.ranks, takes_part=True)
        self._bucket_exchange: BucketExchange = open_bucket_exchange(
            self._name,
            list(self._names),
            list(self._names.values()),
            self._compression,
            self._progress,
        )
        self._put_residuals(residuals)

    def _put_residuals(self, residuals: Mapping[str, ResidualState]) -> None:
        put_in([self._bucket_exchange], residuals)
        # What the bucket has no room for, until the ranks agree to send it along.
        self._residuals = {} if self._bucket_exchange.has_room else dict(residuals)

    def _take_out(self) -> dict[str, ResidualState]:
        """Return the residual, by parameter name."""
        return {**self._residuals, **take_out([self._bucket_exchange])}

    def meet(
        self, center: Sequence[torch.Tensor], signature: Sequence[str], outer_steps: int
    ) -> int:
        """Make sure that all begin with one model, and know whether any has a residual that is new.

        All go on from the steps and the bucket's record of the first of them, and get its outer
        steps returned: others may have loaded nothing.
        signature: what must be equal on all ranks besides, in words.
        """
        own, names = checksums(center), list(self._names.values())
        mine = [outer_steps, self._progress.steps, self._bucket_exchange.record()]

        def look(transport: Transport, all_flags: list[int]) -> tuple[bool, Any]:
            require_the_same(transport, own, names)
            return any(all_flags), transport.broadcast_object(mine)

        of_any, said = self._engine.submit(
            f"{self._name}.replicas",
            self._signature([*signature, signature_of(self._compression)]),
            look,
            flags=bool(unsent(self._residuals)),
        ).wait()
        outer_steps, self._progress.steps, record = said
        self._bucket_exchange.resume(record)
        if of_any:
            self._bucket_exchange.send_along()
            put_in([self._bucket_exchange], self._residuals)
        self._residuals = {}
        if (residual := self._bucket_exchange.exchange.residual) is not None:
            residual.astray = True  # where a state was loaded, on any rank
        self.expected.measure([self._bucket_exchange], self._peers)
        return outer_steps

    def _signature(self, signature: Sequence[str]) -> list[str]:
        return [
            *signature,
            *(f"parameter '{name}' {list(p.shape)} {p.dtype}" for p, name in self._names.items()),
        ]

    @contextmanager
    def reduced(
        self, center: Sequence[torch.Tensor], signature: Sequence[str], steps: int, preempted: bool
    ) -> Iterator[Outcome]:
        """Let the gradients be S meanwhile, where there is one, which then counts.

        A frozen parameter has none where S is zero: the outer momentum is not to move it.
        signature: as in `meet`. steps: that this rank has made in the round.
        preempted: it had SIGTERM.
        Raises HorovodInternalError, on every rank alike, when the ranks disagree or one is gone:
        the residual is then as before.
        """
        bucket_exchange = self._bucket_exchange
        gradients = [p.grad for p in bucket_exchange.parameters]
        try:
            outcome = self._exchange(center, signature, steps, preempted)
            if outcome.moves:
                bucket_exchange.apply(outcome.frozen)
            else:
                bucket_exchange.undo()
            yield outcome
            self._progress.steps += outcome.moves
        finally:
            bucket_exchange.let_go()
            for parameter, gradient in zip(bucket_exchange.parameters, gradients, strict=True):
                parameter.grad = gradient

    def _exchange(
        self, center: Sequence[torch.Tensor], signature: Sequence[str], steps: int, preempted: bool
    ) -> Outcome:
        """Take what this replica has changed for its gradients, and reduce them."""
        bucket_exchange = self._bucket_exchange
        pseudo = torch._foreach_sub(list(center), [p.detach() for p in bucket_exchange.parameters])
        for parameter, gradient in zip(bucket_exchange.parameters, pseudo, strict=True):
            is_still = not parameter.requires_grad and not bool(gradient.any())
            parameter.grad = None if is_still else gradient
        bucket_exchange.take(1.0, 1.0)
        frozen = bucket_exchange.missing()
        mine = [] if bucket_exchange.all_finite() else bucket_exchange.not_finite()
        if mine:
            torch._foreach_zero_(pseudo)  # a weight of 0 makes no numbers of them
        operation = self._engine.submit(
            f"{self._name}.outer",
            self._signature([*signature, self._bucket_exchange.signature]),
            partial(self._work, mine, frozen),
            flags=(0 if mine else steps << _STEPS_SHIFT | _FINITE)
            | (_PREEMPTED if preempted else 0)
            | (_FROZEN if frozen else 0),
        )
        try:
            ranks, lost, everywhere, exchanged = operation.wait()
        except BaseException:
            bucket_exchange.undo()
            raise
        return Outcome(ranks, lost, everywhere, exchanged, operation)

    def _work(
        self, mine: list[str], frozen: list[str], transport: Transport, all_flags: list[int]
    ) -> tuple[list[int], dict[int, list[str]], set[str], Exchanged | None]:
        """Run on the engine's thread, on every rank; return what an `Outcome` begins with."""
        steps = [flags >> _STEPS_SHIFT for flags in all_flags]
        preempted = [
            transport.ranks[place] for place, flags in enumerate(all_flags) if flags & _PREEMPTED
        ]
        lost: dict[int, list[str]] = {}
        if not all(flags & _FINITE for flags in all_flags):
            said = transport.gather_object(mine)
            lost = {rank: names for rank, names in zip(transport.ranks, said, strict=True) if names}
        if not any(steps):
            return preempted, lost, set(), None
        everywhere: set[str] = set()
        if all(flags & _FROZEN for flags in all_flags):
            everywhere = set.intersection(*map(set, transport.gather_object(frozen)))
        self._bucket_exchange.remember()
        share = steps[transport.rank] / sum(steps)
        self._bucket_exchange.weigh(share, share)
        return preempted, lost, everywhere, self._bucket_exchange.reduce(transport)

    def residual_size(self) -> ResidualSize | None:
        """Return this rank's residual, in sums; None where this way has no residual."""
        return self._bucket_exchange.residual_size()

    @property
    def steps(self) -> int:
        """Return how many exchanges there were that have moved the model."""
        return self._progress.steps

    def known_names(self) -> Collection[str]:
        return set(self._bucket_exchange.names)

    def take_state_out(self) -> tuple[dict[str, ResidualState], list[dict[str, Any]]]:
        """Return the residual of each parameter, and the bucket's record."""
        return {**self._unmatched, **self._take_out()}, [self._bucket_exchange.record()]

    def put_state_in(
        self, residuals: Mapping[str, ResidualState], records: list[dict[str, Any]], steps: int
    ) -> None:
        """Hold this back from now on, and go on from these steps; `meet` before an exchange."""
        known = self.known_names()
        self._put_residuals({name: parts for name, parts in residuals.items() if name in known})
        self._unmatched = unmatched(
            residuals,
            known,
            self.ranks[self.rank],
            "LocalSGD trains no parameter of that name; give it the names that the checkpoint "
            "was saved with (named_parameters)",
        )
        for record in records:
            if record["names"] == self._bucket_exchange.names:
                self._bucket_exchange.resume(record)
        self._progress.steps = steps
