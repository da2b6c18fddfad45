"""Mode "adaptive-sgd": every rank trains its own replica, and the replicas are merged.

    rank 0  |= b0 =|= b0 =|= b0 =|= b0 =|     | merge | ...    |= =| a batch and a local step
    rank 1  |== b1 ==|== b1 ==|== b1 ==|      | merge | ...    batches come from the cursor
    rank 2  |==== b2 ====|==== b2 ====|= b2 =|| merge | ...

Adaptive SGD (Ma, Rusu, Wu and Sim 2021, arXiv 2110.07029): dynamic scheduling, batches scaled
towards equal numbers of updates, normalized merging; and the strategies it is compared with.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from collectives.transports import Counter, Transport

from ...compression import ErrorFeedback
from ...exchange.buckets.parameters import (
    ADAPT_TRAINS,
    describe_parameter,
    refuse_new_parameters,
)
from ...optim.step_checks import BUFFERS_KEPT, SkipCounter, checksums, require_the_same
from ...runtime.coordinator import Operation
from ...runtime.logs import EVERYWHERE
from ..current_batch import LearningRate
from ..loader_base import LoaderBase
from ..local_steps import (
    LocalSteps,
    replace_step,
    require_batch,
    require_no_common_step,
    require_one_pass,
)
from ..options import Job
from ..partitioning.cursor import ReplayedCursor, in_step, open_cursor, record_of
from ..replica import Replica
from ..sources import describe_order, rebuilt
from .options import STRATEGIES, MegaBatches, MergingOptions, TakenBatches
from .weights import Report

_log = logging.getLogger("gtopk")


class Merge(NamedTuple):
    """A merge, the same on every rank: each rank's report, weight and next size."""

    reports: Sequence[Report]
    weights: Sequence[float]
    sizes: Sequence[int]


class MergingLoader(LoaderBase[MergingOptions]):
    """Yields this rank's batches; the script takes a local step with each.

    Evaluate the model within `merged`, or after `drain`. See `MergingOptions` to tune it.

    The run's record has a step for each mega-batch with its merge: this rank's batches and local
    steps, even if the merge dropped its replica, and the time that it waited for batches, for the
    other ranks, and for the merge.

    merges:      number of merges so far; it grows when the replicas have just been merged.
    last_merge:  reports, weights and sizes of the last merge.
    record:      with option `record`, all ranks' takes, mega-batch by mega-batch; empty for those
                 before the state from which the run resumed.
    """

    def __init__(self, job: Job[MergingOptions]) -> None:
        super().__init__(job, "adaptive-sgd")
        check(job)
        length = self._set_order(job)
        most, counter = self._gather_sizes(length)
        self._mega_batches = MegaBatches(job.options, most)
        rank, replay = self._world.rank, job.options.replay
        self._cursor = (
            open_cursor(rank, counter, replay)
            if self._mega_batches.strategy.is_dynamic
            else ReplayedCursor(rank, in_step)
        )
        self._steps = LocalSteps(self._world, self._optimizer, "mega-batch")
        self._taken = TakenBatches(self._cursor, self._steps.clock)
        self._loader = rebuilt(job.loader, batch_sampler=self._taken)
        self._rate = LearningRate(
            self._optimizer, job.options.lr_scaling, self._mega_batches.first_size
        )
        self._replica: Replica | None = None
        self._loaded: dict[str, Any] | None = None  # a state loaded before the replica existed
        self._is_compared = False  # whether all ranks' replicas have been compared
        self._weights: Sequence[float] | None = None  # of the last merge
        self._finished: list[range] | None = None  # takes since the last merge, if one is due
        self._current_batch: range | None = None
        self._updates = 0
        self._cursor_count = 0  # the cursor's largest count on any rank
        self._lost_replicas = SkipCounter(self._optimizer.step_policy.options.max_skipped_steps)
        self.merges = 0
        self.last_merge: Merge | None = None
        self.record: list[list[list[list[int]]]] = []
        self._wrapped_step = replace_step(self._optimizer, "adaptive-sgd", self._step)

    def _gather_sizes(self, length: int) -> tuple[list[int], Counter | None]:
        """Return every rank's largest size, and the counter for taking batches, if any."""
        options = self._options
        first_size = max(1, options.global_batch // self._world.size)
        uses_counter = STRATEGIES[options.algorithm].is_dynamic and options.replay is None

        def work(transport: Transport, all_flags: list[int]) -> tuple[list[int], Counter | None]:
            # All ranks must open the counter together, so within a common operation.
            return list(all_flags), transport.counter() if uses_counter else None

        most, counter = self._run_first(
            [f"{length} samples"], work, options.max_batch or first_size
        )
        return most, counter

    @property
    def sizes(self) -> list[int]:
        """Return the ranks' sizes until the next merge."""
        return list(self._mega_batches.sizes)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, over all ranks, if all have the first size."""
        return -(-len(self._order(0)) // self._mega_batches.first_size)

    def _batches(self) -> Generator[Any, None, None]:
        self._require_current_world()
        if self._finished is not None:
            self._merge()  # the script left the last iteration, on all ranks
        yield from self._await_drains()
        self._steps.clock.begin()
        with self._epochs.iterate() as (epoch, start):
            order = self._order(epoch)
            # Otherwise a state was loaded, and its mega-batches hold the rest of the epoch.
            if start == 0:
                self._mega_batches.begin([range(len(order))])
            self._taken.order = order
            self._begin(epoch, describe_order(order))
            while (stretch := self._mega_batches.open()) is not None:
                sizes = self._mega_batches.sizes
                self._cursor.open(
                    self._mega_batches.number, len(stretch), sizes, self._cursor_count
                )
                self._taken.stretch, self._taken.size = stretch, sizes[self._world.rank]
                yield from self._mega_batch()
                if self._finished is not None:  # otherwise a drain has merged it
                    self._merge()
                yield from self._await_drains()

    def _begin(self, epoch: int, order_text: str) -> None:
        """Begin an epoch, the same on all ranks; agree on the cursor's largest count."""
        # Not in the constructor: the script may load or broadcast the model after it.
        replica = self._existing_replica() or self._open_replica()
        if not self._is_compared:
            self._compare(replica)
        trained = set(replica.parameters)
        refuse_new_parameters(self._optimizer.param_groups, trained, ADAPT_TRAINS)
        left = [(place.start, place.stop) for place in self._mega_batches.left]
        signature = [f"epoch {epoch}", f"places left {left}", order_text]
        # Each rank knows the counter only from its own takes.
        self._cursor_count = self._run(
            "epoch", signature, lambda transport, all_flags: max(all_flags), self._cursor.count
        )

    def _await(self, operation: Operation) -> Any:
        """Wait for an operation; its time counts as waiting in the current mega-batch."""
        return self._steps.note_submit(operation).wait()

    def _existing_replica(self) -> Replica | None:
        """Return this rank's replica, made from a loaded state if needed; None without either."""
        if self._replica is None and self._loaded is not None:
            self._open_replica().load_state_dict(self._loaded)
            self._loaded = None
        return self._replica

    def _open_replica(self) -> Replica:
        policy, momentum = self._optimizer.step_policy, self._options.merge_momentum
        self._replica = Replica(policy.trained(), policy.options.compression, momentum)
        self._is_compared = False
        return self._replica

    def _compare(self, replica: Replica) -> None:
        """Check that all ranks start with the same model; predict the time of a merge."""
        names = self._optimizer.step_policy.names
        named = {p: names[p] for p in replica.parameters}
        signature = [describe_parameter(name, parameter) for parameter, name in named.items()]
        # At the center: replicas that resumed from a state differ by their offsets.
        with replica.at_center():
            own = checksums(named)
        self._run(
            "replicas",
            [replica.reduction.signature, *signature],
            lambda transport, all_flags: require_the_same(transport, own, list(named.values())),
        )
        self._steps.expect(replica.reduction, self._name)
        self._is_compared = True

    def _mega_batch(self) -> Iterator[Any]:
        """Yield the batches that this rank takes from the open stretch."""
        self._finished, self._updates = [], 0
        for batch in self._loader:
            take = self._taken.taken.popleft()
            yield from self._yield_batch(batch, take)
            if self._finished is None:
                break  # drained
            self._finish(take)

    def _yield_batch(self, batch: Any, take: range) -> Iterator[Any]:
        self._current_batch, self.num_samples = take, len(take)
        try:
            yield batch
        finally:
            self._current_batch = None

    def _finish(self, take: range) -> None:
        """Note a batch as finished, once."""
        assert self._finished is not None
        # Called after the step, and again when the loop comes back; the last take is the current
        # one.
        if take not in self._finished[-1:]:
            self._finished.append(take)

    def _await_drains(self) -> Iterator[Any]:
        """If other ranks drain, hand out a batch so that the script can drain, too."""
        if not self.drain_wanted:
            return
        self._taken.is_weightless = True
        try:
            for batch in self._loader:
                yield from self._yield_batch(batch, range(0))
        finally:
            self._taken.is_weightless = False
        if self.drain_wanted:
            self._announce_drain(drains=False)  # raises an error on all ranks

    def _announce_drain(self, drains: bool) -> None:
        """Tell all ranks whether this one drains."""
        drain_flags = self._run("drains", [], lambda transport, all_flags: list(all_flags), drains)
        self._settle_drains(drain_flags, "loader.merges", self.merges)

    def _step(self) -> None:
        """Step this rank's replica with its own gradients.

        Raises RuntimeError without a current batch, or while the parameters show the merged model.
        """
        optimizer = self._optimizer
        # A local step belongs to a take; otherwise no report would include its samples.
        require_batch(self._current_batch is not None, self._world.rank, self._mode)
        if self._replica is not None and self._replica.is_at_center:
            raise RuntimeError(
                f"rank {self._world.rank}: optimizer.step() within loader.merged(), which restores "
                "the replica at its end; step before or after"
            )
        # An empty take: the batch was handed out without weight, for a drain.
        if not self._current_batch:
            return
        # The learning rate expects mean gradients, and nothing divides by the samples later.
        if self._options.loss_reduction == "sum":
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(max(self.num_samples, 1))
        self._rate.scale(self.num_samples, None)
        with optimizer.skip_synchronize():
            self._wrapped_step()
        self._updates += 1
        self._finish(self._current_batch)

    def _merge(self, drains: bool = False) -> None:
        """Merge all ranks' replicas, and continue from there; ranks learn which of them drain."""
        replica, batches = self._replica, self._mega_batches
        assert replica is not None
        assert self._finished is not None
        perturbs = self._options.perturbation > 0
        norm = replica.norm() if perturbs else 0.0
        finite = replica.prepare()
        if not finite:
            # The moments belong to the replica that was not finite and has been reset to the
            # center.
            self._optimizer.state.clear()
        own_report = Report(
            batches.sizes[self._world.rank],
            # No model contains this work, although its samples are finished.
            self._updates if finite else 0,
            sum(map(len, self._finished)) if finite else 0,
            norm if finite else 0.0,
            finite,
            self._finished,
        )
        bounds = [[take.start, take.stop] for take in self._finished]
        message = [*own_report[:-1], bounds], self._cursor.count

        def work(transport: Transport, all_flags: list[int]) -> Any:
            received = transport.gather_object(message)
            # All decide from the same reports: weights, sizes, and whether to exchange at all.
            reports = [
                Report._make([*fields, [range(*take) for take in takes]])
                for (*fields, takes), _ in received
            ]
            weights = batches.merge_weights(reports)
            update = None
            if any(report.finite for report in reports):
                update = replica.exchange(transport, weights[transport.rank])
            return reports, weights, max(count for _, count in received), update, list(all_flags)

        reports, weights, self._cursor_count, update, drain_flags = self._run(
            "merge", [replica.reduction.signature], work, drains
        )
        self._steps.computed()
        self._steps.note_exchange(replica.reduction)
        # Includes the samples of a dropped replica, which its report to the ranks leaves out.
        samples = sum(map(len, self._finished))
        self._steps.close(self._world.step - 1, samples, self._updates, update is None)
        weight = weights[self._world.rank]
        (replica.pull if batches.strategy.force else replica.merge)(update, weight)
        batches.close(reports)
        self._finished = self._current_batch = None
        self._epochs.reach(len(self._taken.order) - sum(map(len, batches.left)))
        self._weights = weights
        self._record_merge(Merge(reports, weights, batches.sizes), update is not None)
        self._settle_drains(drain_flags, "loader.merges", self.merges)

    def _record_merge(self, merge: Merge, merged: bool) -> None:
        """Count the merge and the replicas that it dropped; log changes."""
        before = self.last_merge.sizes if self.last_merge else None
        self.merges += 1
        self.last_merge = merge._replace(sizes=list(merge.sizes))
        if self._options.record:
            self.record.append(record_of(report.takes for report in merge.reports))
        lost = [rank for rank, report in enumerate(merge.reports) if not report.finite]
        self._lost_replicas.count += len(lost)
        if merged and not lost:
            self._lost_replicas.end_row()
        else:
            _log.warning(
                "rank %d: merge %d %s: %s not finite%s",
                self._world.rank,
                self.merges,
                "excludes replicas" if merged else "was skipped, all ranks restore the center",
                f"those of ranks {', '.join(map(str, lost))} are" if lost else "their sum is",
                f"; {BUFFERS_KEPT}" if merged else "",
                extra=EVERYWHERE,
            )
            self._lost_replicas.lengthen(
                lambda n: (
                    f"rank {self._world.rank}: replicas were not finite in {n} merges in a row"
                )
            )
        if self._world.rank == 0 and before is not None and before != self.last_merge.sizes:
            _log.info(
                "adaptive batches: after merge %d batches of %s samples; local steps were %s",
                self.merges,
                ", ".join(map(str, merge.sizes)),
                ", ".join(str(report.updates) for report in merge.reports),
            )

    @property
    def lost_replicas(self) -> int:
        """How often a replica was not finite and was replaced with the others' model."""
        return self._lost_replicas.count

    def merged(self) -> AbstractContextManager[None]:
        """Show the merged model in the parameters within this context, to evaluate or save it.

        After an epoch they show it anyway, except with compressed merges and strategies with an
        elastic force, where replicas stay different. A state taken in the context holds the replica
        that comes back; after a drain that is the merged model.
        """
        replica = self._existing_replica()
        return nullcontext() if replica is None else replica.at_center()

    def drain(self) -> None:
        """Make all replicas the merged model, unsent offsets included; all ranks must call it.

        Call it at the end of a training, or before a checkpoint. With an elastic force the replicas
        become the center. Within an epoch every rank must call it after the first step that finds
        `merges` at, or above, the same number: the mega-batch ends there, and a batch without a
        step is handed out again. A rank that gets no more batches of the mega-batch gets one
        without weight so that it can call it. Raises RuntimeError, on every rank, if some did not
        call it.
        """
        self._require_current_world()
        if self._finished is not None:
            self._merge(drains=True)
        while self.drain_wanted:
            self._announce_drain(drains=True)
        replica = self._existing_replica()
        if replica is None:
            return
        # With a force the center alone is the model; before the first merge all replicas equal it.
        if self._mega_batches.strategy.force or self._weights is None:
            replica.collapse()
            return
        # A lost replica has weight 0, and any offset of an equal weight.
        weight = self._weights[self._world.rank] or 1.0 / self._world.size
        offset = replica.weighted_offset(weight)

        def work(transport: Transport, all_flags: list[int]) -> bool:
            if any(all_flags):
                transport.allreduce(offset)
            return any(all_flags)

        has_offset = not replica.was_center
        has_any_offset = self._run("drain", [], work, has_offset)
        replica.collapse(offset if has_any_offset else None)

    def _state(self) -> dict[str, Any]:
        """Return the state after the last merge; later steps are computed again after loading it.

        It holds the merged model, and is equal on all ranks, except for the parameters of replicas
        that differ from that model. Raises RuntimeError if they do and steps have followed the
        merge.
        """
        replica = self._replica
        has_steps = self._finished is not None and (self._updates or self._finished)
        # A state holds a replica as of the last merge; steps since can be repeated only from there.
        if has_steps and replica is not None and not replica.was_center:
            raise RuntimeError(
                "this rank's replica has an unsent offset, and has taken steps since the last "
                "merge; take the checkpoint when loader.merges has grown, or after the epoch"
            )
        return {
            "ranks": self._world.size,
            "epochs": self._epochs.state_dict(before_leaving=self._finished is not None),
            "batches": self._mega_batches.state_dict(),
            "replica": replica.state_dict() if replica is not None else self._loaded,
            "weights": list(self._weights) if self._weights else None,
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Resume from another loader's last merge, with its model.

        The parameters hold the model at once, or from the next iteration, `merged` or `drain` on.
        Raises ValueError for another number of ranks if replicas have offsets: call drain() before
        the checkpoint.
        """
        replica = state["replica"]
        if replica and replica["own"] and state["ranks"] != self._world.size:
            raise ValueError(
                f"the state is of {state['ranks']} ranks, whose replicas have unsent offsets, and "
                f"this job has {self._world.size}; call loader.drain() on all ranks before the "
                "checkpoint"
            )
        self._epochs.close()  # only after the state has been accepted
        self._mega_batches.load_state_dict(state["batches"])
        if self._options.record:
            number = self._mega_batches.number
            self.record = [*self.record[:number], *[[]] * (number - len(self.record))]
        self._finished = None
        self._lost_replicas.end_row()
        # The weights belong to that job's ranks.
        self._weights = state["weights"] if state["ranks"] == self._world.size else None
        if self._replica is not None and replica:
            self._replica.load_state_dict(replica)
        else:
            self._replica, self._loaded = None, replica


def check(job: Job[MergingOptions]) -> None:
    """Raise ValueError for options that replicas do not support."""
    optimizer = job.optimizer
    require_one_pass(optimizer, "mode 'adaptive-sgd' makes a local step with every batch")
    require_no_common_step(optimizer, "mode 'adaptive-sgd' exchanges models, not gradients")
    compression = optimizer.step_policy.options.compression
    if isinstance(compression, ErrorFeedback) and compression.corrects:
        raise ValueError(
            "mode 'adaptive-sgd' selects from changes of models, not from gradients: use "
            "momentum_correction=0 and adam_correction=None, with momentum or Adam in the wrapped "
            "optimizer, or merge_momentum"
        )
