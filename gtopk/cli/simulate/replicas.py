"""Replicas in simulated time: an event queue orders local steps; the merges are real."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.transports import Transport
from collectives.transports.counters import LocalCounter

from ...adaptive.current_batch import FACTORS
from ...adaptive.model_averaging.options import MegaBatches, MergingOptions
from ...adaptive.model_averaging.weights import Report
from ...adaptive.partitioning.cursor import (
    Cursor,
    ReplayedCursor,
    SampleRange,
    SharedCursor,
    in_step,
)
from ...adaptive.partitioning.cuts import shuffled
from ...adaptive.replica import Replica
from .setting import Record, Setting


class Trained(NamedTuple):
    """The model, replica and optimizer of a rank in this process."""

    model: torch.nn.Module
    replica: Replica
    optimizer: torch.optim.Optimizer


@dataclass
class Worker:
    """A simulated rank.

    number: the rank in the cluster, which gives its speed.
    trained: None if the model is in another process.
    dies_at: the second at which it dies.
    finished, updates: since the last merge. free_at: when it finished its last batch.
    """

    number: int
    trained: Trained | None
    noise: np.random.Generator
    dies_at: float
    finished: list[range] = field(default_factory=list)
    updates: int = 0
    free_at: float = 0.0


def simulate(setting: Setting, mode: str, **options: Any) -> Record:
    """Train replicas with a strategy of mode "adaptive-sgd", and return the record.

    A rank that dies loses its work since the last merge; other ranks get its samples.
    """
    run = _Run(setting, mode, options)
    for epoch in range(setting.epochs):
        run.epoch(epoch)
    return run.record


class _Run:
    def __init__(self, setting: Setting, mode: str, options: dict[str, Any]) -> None:
        cluster, task = setting.cluster, setting.task
        ranks = cluster.ranks
        self.setting = setting
        self.record = Record(mode, setting.seed, busy=[0.0] * ranks)
        merging = MergingOptions(setting.global_batch, mega_batch=setting.mega_batch, **options)
        merging.check()
        self.batches = MegaBatches(merging, [max(1, setting.global_batch // ranks)] * ranks)
        is_dynamic = self.batches.strategy.is_dynamic
        # Claiming samples takes a round trip to the shared counter.
        self._take_seconds = 2 * cluster.link.latency_seconds if is_dynamic else 0.0
        self._factor = FACTORS[merging.lr_scaling]
        self._samples_since_evaluation = 0  # samples merged since the last evaluation
        counter, noises = LocalCounter(), cluster.noises(setting.seed)
        self.cursors: list[Cursor] = [
            SharedCursor(counter) if is_dynamic else ReplayedCursor(place, in_step)
            for place in range(ranks)
        ]
        self.workers = []
        for rank in range(ranks):
            trained = None
            if rank in setting.ranks.here:
                model = task.model()
                parameters = list(model.parameters())
                replica = Replica(parameters, setting.compression, merging.merge_momentum)
                trained = Trained(model, replica, setting.optimizer(parameters))
            dies_at = min((d.second for d in cluster.deaths if d.rank == rank), default=math.inf)
            self.workers.append(Worker(rank, trained, noises[rank], dies_at))

    def epoch(self, epoch: int) -> None:
        """Train until every sample is in a merge."""
        order = shuffled(self.setting.task.samples, 1000 * self.setting.seed, epoch)
        self.batches.begin([range(len(order))])
        while (stretch := self.batches.open()) is not None:
            self._mega_batch(stretch, order)
            self._merge()
            if self._samples_since_evaluation >= self.setting.evaluate_every > 0:
                self._evaluate()
        self._evaluate()

    def _evaluate(self) -> None:
        """Record the merged model's accuracy; this takes no simulated time."""
        self._samples_since_evaluation = 0
        setting, first = self.setting, self.workers[0]
        accuracy = torch.zeros(1, dtype=torch.float64)
        if first.trained is not None:
            with first.trained.replica.at_center():
                accuracy[0] = setting.task.accuracy(first.trained.model)
        # Evaluate on the first living rank: rank 0 may be dead, but its process prints the results.
        setting.ranks.broadcast(accuracy, first.number)
        self.record.accuracy.append((self.record.seconds, float(accuracy)))

    def _mega_batch(self, stretch: SampleRange, order: Sequence[int]) -> None:
        batches, began = self.batches, self.record.seconds
        count = max(cursor.count for cursor in self.cursors)
        # Cursors are indexed by place; after a death the other ranks move up.
        del self.cursors[len(self.workers) :]
        free = []
        for place, worker in enumerate(self.workers):
            self.cursors[place].open(batches.number, len(stretch), batches.sizes, count)
            worker.finished, worker.updates, worker.free_at = [], 0, began
            free.append((began, place))
        while free:
            second, place = heapq.heappop(free)
            worker = self.workers[place]
            if second >= worker.dies_at:
                continue
            take = self.cursors[place].take(batches.sizes[place])
            if not take:
                continue
            places = [order[p] for part in stretch.places(take) for p in part]
            work = self.setting.task.work_of(places)
            seconds = self._take_seconds + self.setting.cluster.compute_seconds(
                worker.number, work, second, worker.noise
            )
            # The others wait until it dies. No report has its samples, so others get them.
            if second + seconds >= worker.dies_at:
                worker.free_at = worker.dies_at
                continue
            if worker.trained is not None:
                self._step(worker.trained, places)
            worker.updates += 1
            self.record.samples += len(places)
            worker.finished.append(take)
            worker.free_at = second + seconds
            self.record.busy[worker.number] += seconds - self._take_seconds
            heapq.heappush(free, (worker.free_at, place))

    def _step(self, trained: Trained, places: Sequence[int]) -> None:
        factor = self._factor(len(places) / self.batches.first_size, None, 1)
        for group in trained.optimizer.param_groups:
            group["lr"] = factor * self.setting.learning_rate
        trained.optimizer.zero_grad()
        self.setting.task.loss(trained.model, torch.tensor(places)).backward()
        trained.optimizer.step()

    def _merge(self) -> None:
        record, batches = self.record, self.batches
        exchange_seconds = self.setting.reduce_seconds
        end = max(worker.free_at for worker in self.workers)
        # Iterate backwards, because later places move up. If a rank dies during the merge, the
        # others wait until then, and its work is lost.
        for place in reversed(range(len(self.workers))):
            if self.workers[place].dies_at <= end + exchange_seconds:
                end = max(end, self.workers[place].dies_at)
                del self.workers[place]
                batches.remove_rank(place)
        workers = self.workers
        if not workers:
            raise ValueError("every rank has died")
        reports = [self._report(worker, batches.sizes[p]) for p, worker in enumerate(workers)]
        weights = batches.merge_weights(reports)

        def merge(transport: Transport) -> None:
            trained, weight = workers[transport.rank].trained, weights[transport.rank]
            assert trained is not None
            # Silence NumPy as the engine does: the merge itself detects non-finite numbers.
            with np.errstate(over="ignore", invalid="ignore"):
                update = trained.replica.exchange(transport, weight)
            change = trained.replica.pull if batches.strategy.force else trained.replica.merge
            change(update, weight)

        self.setting.ranks.run_on([worker.number for worker in workers], merge)
        batches.close(reports)
        record.seconds = end + exchange_seconds
        record.exchange += exchange_seconds
        by_rank = {worker.number: report for worker, report in zip(workers, reports, strict=True)}
        all_reports = [by_rank.get(rank) for rank in range(self.setting.cluster.ranks)]
        record.updates.append([report.updates if report else 0 for report in all_reports])
        record.steps += max(record.updates[-1])
        record.skipped += sum(not report.finite for report in reports)
        self._samples_since_evaluation += sum(report.samples for report in reports)
        samples = [report.samples if report else 0 for report in all_reports]
        record.sizes.append((record.seconds, samples))

    def _report(self, worker: Worker, size: int) -> Report:
        norm_and_finite = torch.zeros(2, dtype=torch.float64)  # norm, whether finite
        if worker.trained is not None:
            replica = worker.trained.replica
            perturbs = self.batches.options.perturbation > 0
            norm_and_finite[0] = replica.norm() if perturbs else 0.0
            norm_and_finite[1] = replica.prepare()
        self.setting.ranks.broadcast(norm_and_finite, worker.number)
        norm, finite = float(norm_and_finite[0]), bool(norm_and_finite[1])
        return Report(
            size,
            worker.updates if finite else 0,
            sum(map(len, worker.finished)) if finite else 0,
            norm if finite else 0.0,
            finite,
            worker.finished,
        )
