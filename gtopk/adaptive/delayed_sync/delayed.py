"""Mode "abs": a loader of micro-batches, and an optimizer with rounds as steps (see `rounds`).

    begin            pass 0              pass 1              finish        of an epoch
      o--------[== rounds ==]o-------[== rounds ==]o-----------x
    agree                   agree                 agree                    all drain or all continue

At every `_agree` all computed gradients are applied, and all ranks know what is left. A pass
ends when a rank has computed all micro-batches that were dealt to it, or when one drains.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from ...exchange.buckets.parameters import ADAPT_TRAINS, refuse_new_parameters
from ...runtime.logs import EVERYWHERE
from ..current_batch import LearningRate
from ..loader_base import LoaderBase
from ..local_steps import LocalSteps, replace_step, require_batch, require_one_pass
from ..options import Job, RoundOptions
from ..partitioning.cuts import Passes
from ..replica import RoundExchange
from ..sources import WorkerSeeds, describe_order, rebuilt
from .rounds import AgreedSettings, Rounds, RoundWire


@contextmanager
def unscaled_gradients(optimizer: Any) -> Iterator[tuple[float, bool]]:
    """Remove a GradScaler's attributes; yield the loss scale, and whether gradients overflowed.

    GradScaler does not unscale for a fused optimizer; it sets `grad_scale` and `found_inf` on it
    during `step`. A round adds up micro-batches of different scales and steps later, so both
    attributes are removed within this context.
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
    """Yields this rank's micro-batches, as many in a round as it has time for.

    The script calls `step` for every batch, as before; most steps only add up gradients. The
    updates of an iteration's last rounds are applied before the iteration ends.

    The run's record has a step for each round, added when its update arrives: its micro-batches,
    their time, and all the time that this rank waited, for others to be ready or for the update. A
    round in which no rank had samples is not recorded; its time counts in the next one.

    left_out: micro-batches without a step, because GradScaler takes none after an overflow.
    """

    def __init__(self, job: Job[RoundOptions]) -> None:
        options, world, optimizer = job.options, job.world, job.optimizer
        policy = optimizer.step_policy
        super().__init__(job, "abs")
        check(job)
        length = self._set_order(job)
        # Refilled for each pass: the DataLoader keeps this very list as its batch_sampler.
        self._micro_batches: list[list[int]] = []  # indices of this pass's micro-batches
        self._loader = rebuilt(job.loader, batch_sampler=self._micro_batches)
        self._seeds = WorkerSeeds(self._loader, world.rank)
        self._rate = LearningRate(optimizer, options.lr_scaling, options.global_batch)
        self._passes = Passes(world.size, options.micro_batch)
        self._run_first([f"{length} samples", *policy.options.signature()])
        trained = policy.trained()
        self._trained = set(trained)
        self.exchange = RoundExchange(trained, policy.options.compression)
        self._steps = LocalSteps(world, optimizer, "round")
        self._steps.expect(self.exchange, self._name)
        self._settings = AgreedSettings(optimizer)
        self._applied = policy.progress  # counts rounds, for the replicas' check
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
        self._abandoned: Rounds | None = None  # still running when a state was loaded
        self._loaded: dict[str, Any] = {}  # that state; its residual is loaded after their end
        self._in_epoch = self._in_pass = False
        self._length, self._order_text = 0, ""  # of the epoch's order
        self._has_batch = False
        self.left_out = 0
        self._wrapped_step = replace_step(optimizer, "abs", self._step)
        # Scripts call it before they clip or unscale. Here that affects the micro-batch's
        # gradients, which `step` adds to the round.
        optimizer.synchronize = lambda: None
        optimizer.set_num_samples = refuse_tokens

    @property
    def round(self) -> int:
        """Return the number of the open round; it grows on every rank between steps."""
        return self.rounds.number

    def _apply(self, samples: int) -> None:
        """Take a step with the update in the parameters' gradients."""
        self._report(skipped=False)
        self._rate.scale(samples, None)
        policy = self._optimizer.step_policy
        policy.skipped.end_row()
        # After the reduction: the update, and so its norm, is the same on all ranks.
        policy.clip()
        with self._optimizer.skip_synchronize(), self._settings.set():
            self._wrapped_step()
        self._applied.steps += 1
        policy.replicas.await_step(updates=True)

    def _skip(self, culprits: Sequence[int]) -> None:
        """Count a round that is not applied, the same on all ranks."""
        self._report(skipped=True)
        where = "; ".join(f"rank {rank}" for rank in culprits)
        self._optimizer.step_policy.skipped.note(self._world.rank, self._world.step, where)
        # Only here: the optimizer's own step counts an applied round.
        self._world.step += 1

    def _report(self, skipped: bool) -> None:
        """Report the round that has just been reduced."""
        self._steps.note_exchange(self.exchange)
        if self._wire.divergences is not None:
            self._optimizer.step_policy.replicas.end(self._wire.divergences, self._optimizer.state)
        self._steps.close(self._world.step, self._wire.samples, skipped=skipped)

    def _step(self) -> None:
        """Add the micro-batch's gradients to the round; apply an update if a round has ended.

        Raises RuntimeError without a current micro-batch.
        """
        require_batch(self._has_batch, self._world.rank, self._mode)
        # Includes `poll`: it may apply an earlier round's update, which no GradScaler has scaled.
        with unscaled_gradients(self._optimizer) as (loss_scale, overflow):
            if overflow:
                self._leave_out()
                return
            self._has_batch = False
            if self.num_samples:
                summed = self._options.loss_reduction == "sum"
                self.rounds.add(self.num_samples, summed, loss_scale)
            # The round has taken the gradients of its parameters; the others would accumulate.
            self._optimizer.zero_grad()
            self.rounds.poll()
        self._settings.seen = self.round

    def _leave_out(self) -> None:
        """Finish the current micro-batch without its gradients."""
        self._has_batch = False
        self._optimizer.zero_grad()
        # A placeholder so that the script can drain; it is no micro-batch of the pass.
        if not self.num_samples:
            return
        if not self.left_out:
            _log.warning(
                "rank %d: a micro-batch without optimizer.step() is left out of its round "
                "(GradScaler takes no step after an overflow); loader.left_out counts them",
                self._world.rank,
            )
        self.left_out += 1
        self.rounds.leave_out()
        self.rounds.poll()

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch, over all ranks."""
        return -(-len(self._order(0)) // self._options.micro_batch)

    def _batches(self) -> Generator[Any, None, None]:
        self._require_current_world()
        if self._in_epoch:  # the script left the last iteration, on all ranks
            self._has_batch = False
            self._close_pass()
        self._end_abandoned()
        refuse_new_parameters(self._optimizer.param_groups, self._trained, ADAPT_TRAINS)
        self._steps.clock.begin()
        with self._epochs.iterate() as (epoch, start):
            order = self._order(epoch)
            self._length, self._order_text = len(order), describe_order(order)
            # Otherwise a state was loaded, and its passes hold the rest of the epoch.
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
        micro_batches = self._passes.begin_pass(self._world.rank)
        self._micro_batches[:] = [[order[place] for place in places] for places in micro_batches]
        self._seeds.begin(self._epochs.epoch, self._passes.number)
        self.rounds.begin()
        self._in_pass = True
        # Without batches the DataLoader is not used: it would start its workers for nothing.
        for batch, places in zip(self._loader if micro_batches else (), micro_batches, strict=True):
            yield from self._yield_batch(batch, len(places))
            if self.rounds.ended:
                break
        self._close_pass()

    def _yield_batch(self, batch: Any, samples: int) -> Iterator[Any]:
        self.num_samples = samples
        self._has_batch = True
        yield batch
        # The script's code after the batch has run, so a schedule that follows `round` has seen it.
        self._settings.seen = self.round  # after a batch without a step, too
        if self._has_batch:
            self._leave_out()

    def _close_pass(self) -> None:
        """End the pass on all ranks, apply its gradients, and note what is left."""
        if not self._in_pass:
            return
        self.rounds.finish()
        self._in_pass = False
        self._passes.close(self.rounds.batches)
        self._epochs.reach(self._length - sum(map(len, self._passes.left)))

    def _end_abandoned(self) -> None:
        """End, with all ranks, the rounds that ran when a state was loaded; load its residual."""
        if self._abandoned is None:
            return
        self._require_current_world()
        # The other ranks may wait in the old rounds' operations, which must end before new ones
        # begin.
        self._abandoned.abandon()
        self._abandoned.finish()
        self.exchange.pop_reduction()  # no reported step includes this exchange
        self.exchange.load_state_dict(self._loaded)
        self._abandoned, self._loaded = None, {}

    def _await_drains(self, order: Sequence[int]) -> Iterator[Any]:
        """Return when all ranks continue; if some drain, hand out a batch so that this one can."""
        while not self._agree(drains=False):
            self._micro_batches[:] = [list(order[: self._options.micro_batch])]
            for batch in self._loader:
                yield from self._yield_batch(batch, 0)

    def _agree(self, drains: bool) -> bool:
        """Return whether all ranks drain or all continue; if they differ, ask the others to drain.

        Raises RuntimeError, on every rank, if a rank continues although it was asked to drain.
        """
        # Compared on all ranks: with different numbers left they would deal different passes.
        left = f"{len(self._passes.left)} micro-batches left"
        signature = [f"epoch {self._epochs.epoch}", left, self._order_text]
        drain_flags = self._wire.gather_drains(signature, drains)
        return self._settle_drains(drain_flags, "loader.round", self.round)

    def drain(self) -> None:
        """Apply all computed gradients, for an evaluation or a checkpoint within an epoch.

        Every rank must call it after the step that finds `round` at the same number: the number is
        then the same on all ranks until they continue. A rank with nothing more to compute gets a
        batch without weight so that it can call it. Between epochs it has nothing to do. Raises
        RuntimeError, on every rank, if some did not call it.
        """
        self._end_abandoned()
        if not self._in_epoch:
            return
        self._require_current_world()
        if self._has_batch:
            self._leave_out()
        self._close_pass()
        while not self._agree(drains=True):
            pass

    def _state(self) -> dict[str, Any]:
        """Return the rest of the epoch, and the state that later rounds depend on.

        It is equal on all ranks, except for this rank's residual. Raises RuntimeError within an
        epoch before `drain`.
        """
        if self._in_pass or not self.rounds.is_drained:
            raise RuntimeError(
                "some gradients are not applied yet, and a checkpoint would lose them: call "
                "loader.drain() on all ranks first, as gtopk.save_checkpoint does"
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

        With another number of ranks speeds start equal. The residual is this rank's own; with
        another number of ranks it is a share of the sum of all. Gradients of an iteration that the
        script left are not applied any more; then every rank must load a state.
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


def refuse_tokens(*arguments: Any) -> None:
    """Raise ValueError: a round weights micro-batches only by their samples."""
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
    # AdaScale needs the noise scale, but rounds add gradients up before they could be probed.
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
