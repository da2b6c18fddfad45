"""HogbatchLoader: a worker's epochs; in each, every sample is in a batch of some worker.

    begin      when all workers have ended the last one
    batches    claimed one by one, each for one step; then those that others did not finish
    end        with several nodes: their models are merged with all updates

No worker waits for another until an epoch is over; operations of all ranks run between epochs.

Periods: a worker's work in a quarter of a second, reported as a step of the run's record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch

from ...exchange.buckets.parameters import ADAPT_TRAINS, refuse_new_parameters
from ...runtime.world.membership import World
from ..loader_base import LoaderBase, is_over
from ..local_steps import LocalSteps
from ..options import Job
from ..sources import describe_order, rebuilt
from .ledger import IS_FAST, NAMES, WorkerTable, device_class_of
from .node import join_node
from .options import HogbatchOptions, check
from .report import BATCH, Report, faster_workers, mean_loss, report_of
from .shared_model import layout_of, require_shareable, states_of
from .sizes import ClassSizes, Sizer, default_thresholds, thresholds_of
from .workers_batch import ClaimedBatches, WorkersBatch, Writer

PERIOD_NANOSECONDS: Final = 250_000_000  # batches may be far shorter


class Periods:
    """Reports a worker's work since its last report: at least one update, except at the end."""

    def __init__(self, steps: LocalSteps, table: WorkerTable, world: World) -> None:
        self._steps, self._table, self._world = steps, table, world
        self._reported, self._since = [0, 0, 0], 0  # updates, samples, skipped; nanoseconds

    def begin(self) -> None:
        """Begin a period at the start of an epoch."""
        self._since = time.perf_counter_ns()

    def poll(self) -> None:
        """End the period and start another if it has lasted long enough."""
        is_due = time.perf_counter_ns() - self._since >= PERIOD_NANOSECONDS
        if is_due and self._table["updates"] > self._reported[0]:
            self.end()

    def end(self) -> None:
        """Report the work since the last report, and start another period."""
        before = self._reported
        self._reported = [self._table[field] for field in ("updates", "samples", "skipped")]
        updates, samples, skipped = (
            now - then for now, then in zip(self._reported, before, strict=True)
        )
        self._since = time.perf_counter_ns()
        self._steps.computed()
        self._steps.close(self._world.step - 1, samples, updates, skipped=skipped > 0)


class HogbatchLoader(LoaderBase[HogbatchOptions]):
    """Yields this worker's batches; take one step with each.

    Call `evaluate`, `drain` and `audited` on all workers together, and only between epochs; within
    an epoch `evaluate` and `drain` raise RuntimeError. See `HogbatchOptions` to tune it.

    The run's record has a step for each period: the batches that this worker begins in a quarter of
    a second, at least one, or until the epoch ends, including the wait for its end. With several
    nodes, only the first worker of each sends anything: it merges the nodes' models.
    """

    way_out = "resume from a checkpoint in another job"

    def __init__(self, job: Job[HogbatchOptions], adapts: bool = False) -> None:
        options, world, optimizer = job.options, job.world, job.optimizer
        super().__init__(job, "adaptive-hogbatch" if adapts else "hogbatch")
        check(job, self._mode)
        self._set_order(job)

        policy = optimizer.step_policy
        names, trained = policy.names, policy.trained()
        require_shareable(names)
        self._class = device_class_of(trained, options.device_class)
        states = states_of(optimizer, trained)
        layout = layout_of(trained, states)
        self._steps = LocalSteps(world, optimizer, "period")
        self._node = join_node(
            job, self._run_first, self._class, layout, trained, states, self._steps
        )
        self._table, self._ledger = self._node.table, self._node.ledger
        self._periods = Periods(self._steps, self._table, world)
        self._writer = Writer(
            self._node.shared,
            self._table,
            trained,
            states,
            optimizer,
            copies=IS_FAST[self._class],
            audits=options.audit,
        )
        self._trained = trained

        batch_size = job.loader.batch_size or 1
        default = default_thresholds(options.min_batch, batch_size, options.max_batch)
        given = thresholds_of(options.sizes).get(self._class)
        class_sizes = ClassSizes(self._node.memory, self._table, self._class)
        is_fast = IS_FAST[self._class]
        self._sizer = Sizer(is_fast, adapts, options.alpha, given, default, class_sizes)
        self._table["kind"] = NAMES.index(self._class)
        self._table["size"] = self._sizer.size
        world.engine.ranks_may_leave |= options.ranks_may_leave
        self._claims = ClaimedBatches(self._node, self._sizer, options, self._steps.clock)
        self._loader = rebuilt(job.loader, batch_sampler=self._claims)
        self._batch = WorkersBatch(job, self._mode, self._node, trained, self._writer, self._sizer)
        self._in_epoch = False
        # Round 1 is the time before all epochs; ending it means that this worker is ready.
        self._ledger.end()

    def __len__(self) -> int:
        """Return the number of batches in an epoch if all had this worker's current size."""
        return -(-len(self._order(0)) // self._sizer.size)

    def _batches(self) -> Generator[Any, None, None]:
        self._writer.check()
        self._publish()
        refuse_new_parameters(self._optimizer.param_groups, set(self._trained), ADAPT_TRAINS)
        epoch, _ = self._epochs.begin()
        order = self._order(epoch)
        self._begin(epoch, order)
        self._claims.begin(order)
        self._in_epoch = True
        self._batch.begin()
        try:
            yield from self._yield_batches()
            while self._claims.reclaim():
                yield from self._yield_batches()
            with self._steps.clock.waiting():
                self._node.merging.end()
        except GeneratorExit:  # the script has left the loop
            self._give_back()
            with self._steps.clock.waiting():
                self._node.merging.end(self._ledger)
            raise
        finally:
            # Before the round ends for this worker: after it, nobody looks for its samples.
            self._give_back()
            self._batch.count_time()
            self._ledger.end()
            self._epochs.finish()
            self._periods.end()
            self._in_epoch = False

    def sit_out(self) -> None:
        """Begin and end an epoch with the others, without taking batches."""
        self._publish()
        epoch, _ = self._epochs.begin()
        self._begin(epoch, self._order(epoch))
        with self._steps.clock.waiting():
            self._node.merging.end(self._ledger)
        self._ledger.end()
        self._epochs.finish()
        self._periods.end()

    def _begin(self, epoch: int, order: Sequence[int]) -> None:
        self._require_current_world()
        length, what = len(order), f"epoch {epoch}, {describe_order(order)}"
        if length > self._node.longest:
            raise ValueError(
                f"rank {self._world.rank}: an epoch of mode {self._mode!r} has at most the "
                f"{self._node.longest} samples of the data set, got an order of {length}"
            )
        self._steps.clock.begin()
        with self._steps.clock.waiting():
            self._ledger.begin(length, what)
            self._node.merging.begin(what)
        self._periods.begin()

    def _yield_batches(self) -> Iterator[Any]:
        """Yield the claimed batches, each of them for one step."""
        for batch in self._loader:
            self._periods.poll()
            places = self._claims.hand_out()
            self.num_samples = len(places)
            self._batch.make_current(places)
            yield batch
            self._batch.leave()

    def _publish(self) -> None:
        """Share a model loaded into a fast worker's copy; the next refresh would overwrite it."""
        self._ledger.before_next_round(self._writer.publish)

    def _give_back(self) -> None:
        """Give the samples that this worker claimed but took no step for back to the others."""
        self._batch.give_back()
        self._claims.give_back()

    def backward(self, loss_of: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """Compute a batch's loss and gradients, in parts if the memory is too small.

        Call it in place of `loss_of(batch).backward()`. A size that did not fit bounds this
        worker's sizes from then on.
        """
        summed = self._options.loss_reduction == "sum"
        return self._batch.memory.backward(loss_of, batch, max(self.num_samples, 1), summed)

    @torch.no_grad()
    def evaluate(
        self, loss_of: Callable[[Any], torch.Tensor], dataset: Any = None, batch: int = BATCH
    ) -> float:
        """Return the mean loss of all samples for the shared model; all workers call it together.

        The fast classes compute it, in large batches; without any, all workers do.
        loss_of: maps a batch to the mean loss of its samples.
        Raises MismatchError, on all workers of a host, if the length of the data set or `batch`
        differs; RuntimeError at once within an epoch, and if the loader's world is over.
        """
        self._require_between_epochs("evaluate")
        self._require_current_world()
        self._publish()
        data: Any = self.dataset if dataset is None else dataset
        collate, refresh = self._loader.collate_fn, partial(self._writer.refresh, waits=True)
        idles = bool(faster_workers(self._node, self._ledger.round + 1))
        with self._steps.clock.waiting() if idles else nullcontext():
            return mean_loss(self._node, data, collate, batch, refresh, loss_of)

    def report(self) -> Report:
        """Return a report of the workers of this node, since the loader was created."""
        return report_of(self._table, self._node.ranks)

    def audited(self) -> float:
        """Return the share of all steps, in L1, that was lost to races; all workers call it.

        Needs audit=True, and no running step: call it between epochs.
        """
        return self._writer.audited(self._run)

    @property
    def last_staleness(self) -> int:
        """Return the number of others' updates while the last batch was computed."""
        return self._writer.last_staleness

    def drain(self) -> None:
        """Merge the nodes' models into one, and copy it into this rank's parameters.

        All ranks call it together, between epochs. Raises RuntimeError at once within an epoch. If
        the loader's world is over, nothing is merged, and each node keeps its model.
        """
        self._require_between_epochs("drain")
        self._publish()
        if is_over(self._world):
            self._writer.refresh(waits=True)
            return
        with self._steps.clock.waiting():
            # A round without places: it begins when every worker of this node has ended the last
            # epoch.
            self._ledger.begin(0, "a drain", between_nodes=False)
            self._node.merging.drain(self._run)
        self._writer.refresh(waits=True)  # others continue to write when this worker has ended
        self._ledger.end()

    def _require_between_epochs(self, what: str) -> None:
        if self._in_epoch:
            raise RuntimeError(
                f"rank {self._world.rank}: loader.{what}() within an epoch of mode {self._mode!r}, "
                "in which workers do not wait for each other: call it (and gtopk.save_checkpoint, "
                "which drains) on all ranks between epochs"
            )

    def _state(self) -> dict[str, Any]:
        """Return the state that the next epoch depends on."""
        return {
            "class": self._class,
            "epochs": self._epochs.state_dict(),
            "size": self._sizer.size,
            "thresholds": self._sizer.thresholds and list(self._sizer.thresholds),
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Resume with the epoch after the one that another loader finished.

        Sizes that its worker found apply here if this worker has its class, and none are given.
        """
        self._epochs.close()
        if state["thresholds"] is not None and state.get("class") == self._class:
            self._sizer.resume(state["thresholds"][0], state["size"])
