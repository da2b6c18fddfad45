"""Mode "abs": a loader of micro-batches, and an optimizer whose steps are rounds (see `rounds`).

    begin            pass 0              pass 1              finish        of an epoch
      o--------[== rounds ==]o-------[== rounds ==]o-----------x
    meet                    meet                  meet                     drain, or go on: alike

At every `meet` everything computed is applied, and all ranks know what is left of the epoch. A pass
ends when a rank has computed all micro-batches that were dealt to it, or when one drains.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from ...exchange.buckets.parameters import KNOWN_TO_ADAPT, require_known
from ...runtime.logs import EVERYWHERE
from ..current_batch import LearningRate
from ..loader_base import LoaderBase
from ..local_steps import LocalSteps, replace_step, require_batch, require_one_pass
from ..options import Job, RoundOptions
from ..partitioning.cuts import Passes
from ..replica import RoundExchange
from ..sources import WorkerSeeds, order_in_words, rebuilt
from .rounds import AgreedSettings, Rounds, RoundWire


@contextmanager
def unscaled_gradients(optimizer: Any) -> Iterator[tuple[float, bool]]:
    """Remove a GradScaler's attributes; yield the loss scale, and whether gradients overflowed.

    For a fused optimizer GradScaler unscales nothing: it sets `grad_scale` and `found_inf` on it
    during `step`. A round adds up micro-batches of different scales and steps later, so both
    attributes are removed meanwhile.
    """
    own = vars(optimizer)
    removed = {name: own.pop(name) for name in ("grad_scale", "found_inf") if name in own}
    scale, overflow = removed.get("grad_scale"), removed.get("found_inf")
    try:
        yield 1.0 if scale is None else float(scale), overflow is not None and bool(overflow)
    finally:
        own.update(removed)


_log = logging.getLogger("gtopk")
SAFE_MOMENTUM: Final = 0.5


class DelayedLoader(LoaderBase[RoundOptions]):
    """An iterable of this rank's micro-batches, as many in a round as it has time for.

    The script calls `step` for every batch, as before; most steps only add up gradients. The
    updates of an iteration's last rounds are applied before the iteration ends.

    The run's record has a step for each round whose update has arrived: its micro-batches, their
    time, and all the time that this rank waited, for others to be ready or for the update. A round
    in which no rank had samples is not recorded; its time counts for the next one.

    left_out: micro-batches without a step, as GradScaler takes none after an overflow.
    """

    def __init__(self, job: Job[RoundOptions]) -> None:
        options, world, optimizer = job.options, job.world, job.optimizer
        policy = optimizer.step_policy
        super().__init__(job, "abs")
        check(job)
        length = self._indexed(job)
        # Filled anew for each pass: the DataLoader keeps this very list as its batch_sampler.
        self._mine: list[list[int]] = []  # indices of this pass's micro-batches
        self._loader = rebuilt(job.loader, batch_sampler=self._mine)
        self._seeds = WorkerSeeds(self._loader, world.rank)
        self._rate = LearningRate(optimizer, options.lr_scaling, options.global_batch)
        self._passes = Passes(world.size, options.micro_batch)
        self._meet([f"{length} samples", *policy.options.signature()])
        trained = policy.trained()
        self._trained = set(trained)
        self.exchange = RoundExchange(trained, policy.options.compression)
        self._steps = LocalSteps(world, optimizer, "round")
        self._steps.expect(self.exchange, self._name)
        self._settings = AgreedSettings(optimizer)
        self._applied = policy.progress  # rounds; the replicas' check goes by it
        self._wire = RoundWire(
            self._name, self.exchange, world, optimizer, self._settings, self._steps
        )
        self._open_rounds = partial(
            Rounds,
            trained,
            self._wire,
            world.rank,
            world.size,
            options.global_batch,
            self._apply,
            self._skip,
        )
        self.rounds = self._open_rounds()
        self._abandoned: Rounds | None = None  # under way when a state was loaded
        self._loaded: dict[str, Any] = {}  # that state, whose residual waits for their end
        self._in_epoch = self._in_pass = False
        self._length, self._order_said = 0, ""  # of the epoch's order
        self._has_batch = False
        self.left_out = 0
        self._wrapped_step = replace_step(optimizer, "abs", self._step)
        # Scripts call it before they clip or unscale: here that concerns the micro-batch's
        # gradients, which `step` adds to the round.
        optimizer.synchronize = lambda: None
        optimizer.set_num_samples = refuse_tokens

    @property
    def round(self) -> int:
        """Return the number of the open round; it grows on every rank between steps."""
        return self.rounds.number

    def _apply(self, samples: int) -> None:
        """Step with the update that the parameters' gradients hold."""
        self._report(skipped=False)
        self._rate.scale(samples, None)
        policy = self._optimizer.step_policy
        policy.skipped.end_row()
        # After the reduction: the update is the same on all ranks, and so is its norm.
        policy.clip()
        with self._optimizer.skip_synchronize(), self._settings.set():
            self._wrapped_step()
        self._applied.steps += 1
        policy.replicas.await_step(updates=True)

    def _skip(self, culprits: Sequence[int]) -> None:
        """Count a round that is not applied, on all ranks alike."""
        self._report(skipped=True)
        where = "; ".join(f"rank {rank}" for rank in culprits)
        self._optimizer.step_policy.skipped.note(self._world.rank, self._world.step, where)
        # Here only: an applied round is counted by the optimizer's own step.
        self._world.step += 1

    def _report(self, skipped: bool) -> None:
        """Report the round whose outcome has just arrived."""
        self._steps.note_exchange(self.exchange)
        if self._wire.divergences is not None:
            self._optimizer.step_policy.replicas.end(self._wire.divergences, self._optimizer.state)
        self._steps.close(self._world.step, self._wire.samples, skipped=skipped)

    def _step(self) -> None:
        """Add the micro-batch's gradients to the round; apply an update where a round has ended.

        Raises RuntimeError without a current micro-batch.
        """
        require_batch(self._has_batch, self._world.rank, self._mode)
        # Around `poll`, too: it may apply an earlier round's update, which no GradScaler has
        # scaled.
        with unscaled_gradients(self._optimizer) as (loss_scale, overflow):
            if overflow:
                self._leave_out()
                return
            self._has_batch = False
            if self.num_samples:
                summed = self._options.loss_reduction == "sum"
                self.rounds.add(self.num_samples, summed, loss_scale)
            # The round has taken the gradients of what it trains; others would pile up.
            self._optimizer.zero_grad()
            self.rounds.poll()
        self._settings.seen = self.round

    def _leave_out(self) -> None:
        """Finish the current micro-batch without its gradients."""
        self._has_batch = False
        self._optimizer.zero_grad()
        # A placeholder, handed out so that the script can drain: it is no micro-batch of the pass.
        if not self.num_samples:
            return
        if not self.left_out:
            _log.warning(
                "rank %d: a micro-batch that no optimizer.step() was taken with is left out of its "
                "round (GradScaler takes none after an overflow); loader.left_out counts them",
                self._world.rank,
            )
        self.left_out += 1
        self.rounds.leave_out()
        self.rounds.poll()

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch, over all ranks."""
        return -(-len(self._order(0)) // self._options.micro_batch)

    def _batches(self) -> Generator[Any, None, None]:
        self._require_its_world()
        if self._in_epoch:  # a script broke the last iteration off, on all ranks
            self._has_batch = False
            self._close_pass()
        self._end_abandoned()
        require_known(self._optimizer.param_groups, self._trained, KNOWN_TO_ADAPT)
        self._steps.spent.begin()
        with self._epochs.iterate() as (epoch, start):
            order = self._order(epoch)
            self._length, self._order_said = len(order), order_in_words(order)
            # Else a state was loaded, whose passes say what is left of the epoch.
            if start == 0:
                self._passes.begin([range(self._length)])
            self._in_epoch = True
            while True:
                yield from self._await_drains(order)
                if not self._passes.left:
                    break
                yield from self._pass(order)
        self._in_epoch = False

    def _pass(self, order: Sequence[int]) -> Iterator[Any]:
        """Yield the micro-batches dealt to this rank, until one rank has none left or drains."""
        mine = self._passes.begin_pass(self._world.rank)
        self._mine[:] = [[order[place] for place in places] for places in mine]
        self._seeds.begin(self._epochs.epoch, self._passes.number)
        self.rounds.begin()
        self._in_pass = True
        # Without a batch the DataLoader is not asked: it would start its workers for nothing.
        for batch, places in zip(self._loader if mine else (), mine, strict=True):
            yield from self._yield_batch(batch, len(places))
            if self.rounds.ended:
                break
        self._close_pass()

    def _yield_batch(self, batch: Any, samples: int) -> Iterator[Any]:
        self.num_samples = samples
        self._has_batch = True
        yield batch
        # The script's code behind the batch has run: a schedule that follows `round` has seen it.
        self._settings.seen = self.round  # after a batch without a step, too
        if self._has_batch:
            self._leave_out()

    def _close_pass(self) -> None:
        """End the pass on all ranks, apply what they computed, and note what is left."""
        if not self._in_pass:
            return
        self.rounds.finish()
        self._in_pass = False
        self._passes.close(self.rounds.batches)
        self._epochs.reach(self._length - sum(map(len, self._passes.left)))

    def _end_abandoned(self) -> None:
        """End, with all ranks, the rounds under way when a state was loaded; load its residual."""
        if self._abandoned is None:
            return
        self._require_its_world()
        # The other ranks may wait in the old rounds' operations: these must end before new ones
        # begin.
        self._abandoned.abandon()
        self._abandoned.finish()
        self.exchange.pop_reduction()  # this exchange belongs to no reported step
        self.exchange.load_state_dict(self._loaded)
        self._abandoned, self._loaded = None, {}

    def _await_drains(self, order: Sequence[int]) -> Iterator[Any]:
        """Return when all ranks go on; where some drain, hand out a batch so that scripts drain."""
        while not self._agree(drains=False):
            self._mine[:] = [list(order[: self._options.micro_batch])]
            for batch in self._loader:
                yield from self._yield_batch(batch, 0)

    def _agree(self, drains: bool) -> bool:
        """Return whether all ranks drain or all go on; else ask those that go on to drain.

        Raises RuntimeError, on every rank, where one goes on although it was asked to drain.
        """
        # Compared on all ranks: with unlike numbers left they would deal unlike passes.
        left = f"{len(self._passes.left)} micro-batches left"
        signature = [f"epoch {self._epochs.epoch}", left, self._order_said]
        said = self._wire.meet(signature, drains)
        return self._settle_drains(said, "loader.round", self.round)

    def drain(self) -> None:
        """Apply all computed gradients; for an evaluation or a checkpoint within an epoch.

        Every rank must call it after the step that finds `round` at the same number: it is the same
        on all ranks then, and stays so until they go on. A rank with nothing more to compute gets
        a batch without weight so that it can call it. Between epochs there is nothing to drain.
        Raises RuntimeError, on every rank, where some did not call it.
        """
        self._end_abandoned()
        if not self._in_epoch:
            return
        self._require_its_world()
        if self._has_batch:
            self._leave_out()
        self._close_pass()
        while not self._agree(drains=True):
            pass

    def _state(self) -> dict[str, Any]:
        """Return what is left of the epoch, and the state that later rounds depend on.

        It is equal on all ranks, except for this rank's residual. Raises RuntimeError within an
        epoch before `drain`.
        """
        if self._in_pass or not self.rounds.is_drained:
            raise RuntimeError(
                "gradients are under way, which a checkpoint would lose: call loader.drain() on "
                "all ranks before it, as gtopk.save_checkpoint does"
            )
        return {
            **(self._loaded or self.exchange.state_dict()),
            "epochs": self._epochs.state_dict(),
            "passes": self._passes.state_dict(),
            "round": self.rounds.number + self.rounds.ended,
            "samples": self.rounds.samples,
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Resume where another loader stopped.

        With another number of ranks their speeds start equal. The residual is this rank's own; with
        another number of ranks it is a share of the sum of all. Gradients of an iteration that
        was broken off are not applied any more; then every rank must load a state.
        """
        self._epochs.close()
        if self._in_pass:
            # Other ranks may have sent more or less of the round, and join late or never: elastic
            # restores states when ranks have failed.
            self._abandoned, self.rounds = self.rounds, self._open_rounds()
        self._in_epoch = self._in_pass = self._has_batch = False
        self._passes.load_state_dict(state["passes"])
        self.rounds.load(state["round"], state["samples"])
        self._applied.steps = state["steps"]  # some ranks may have been a round ahead
        self._optimizer.step_policy.replicas.await_step(updates=False)
        self._settings.seen = self.round
        if self._abandoned is None:
            self.exchange.load_state_dict(state)
        else:
            self._loaded = state


def refuse_tokens(*said: Any) -> None:
    """Raise ValueError: a round's weights know nothing but the samples of micro-batches."""
    raise ValueError(
        "mode 'abs' weighs micro-batches by their samples and takes no set_num_samples: for a loss "
        "per token use loss_reduction='sum', and divide by the mean number of tokens in a sample"
    )


def check(job: Job[RoundOptions]) -> None:
    """Raise ValueError for options that rounds do not support; warn of an unstable momentum."""
    require_one_pass(
        job.optimizer,
        "mode 'abs' adds up micro-batches itself, as many as there is time for, of the size "
        "micro_batch=",
    )
    # AdaScale needs the noise scale, and rounds add gradients up before anybody could probe them.
    if job.options.lr_scaling == "adascale":
        raise ValueError("mode 'abs' measures no noise: use lr_scaling 'none', 'linear' or 'sqrt'")
    momentum = max(float(group.get("momentum", 0.0)) for group in job.optimizer.param_groups)
    if momentum > SAFE_MOMENTUM:
        _log.warning(
            "mode 'abs' applies gradients one round late: with momentum %g the learning rate must "
            "stay below %.2g/L, where synchronous steps allow %.2g/L (L: the largest curvature). "
            "Use a momentum up to %g, or a smaller learning rate",
            momentum,
            1 - momentum,
            2 * (1 + momentum),
            SAFE_MOMENTUM,
            extra=EVERYWHERE,
        )
