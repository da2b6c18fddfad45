"""Hogbatch in simulated time: real gradients, old by as much as the workers' speeds make them.

worker   claims, reads the model at t | ... | its update reaches the model at t + seconds
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

import torch

from ...adaptive.hogbatch.sizes import Sizer
from ...adaptive.partitioning.cuts import shuffled
from .setting import Record, Setting, mean_loss


class Worker:
    """One rank: its own view of the model, from when it took its batch, and its gradients there.

    model: None: in another process.
    seen: how many updates the shared model had had by then.
    """

    def __init__(self, model: torch.nn.Module | None, sizer: Sizer) -> None:
        self.model = model
        self.sizer = sizer
        self.updates = self.seen = self.samples = 0


class Hogbatch:
    """The shared model, which every process has, and the workers by rank."""

    def __init__(self, setting: Setting, mode: str, ranks: Sequence[int], adapts: bool) -> None:
        self.setting, task, classes = setting, setting.task, setting.classes
        self.record = Record(mode, setting.seed, busy=[0.0] * setting.cluster.ranks)
        self.model = task.model()
        self.optimizer = setting.optimizer(self.model.parameters())
        thresholds = [classes.sizes[classes.name(rank)] for rank in range(setting.cluster.ranks)]
        self.workers = {
            rank: Worker(
                task.model() if rank in setting.ranks.here else None,
                Sizer(rank in classes.fast, adapts, 2.0, thresholds[rank], thresholds[rank]),
            )
            for rank in ranks
        }
        self._clusters = [
            replace(setting.cluster, overhead_seconds=classes.overhead_seconds)
            if rank in classes.fast and classes.overhead_seconds is not None
            else setting.cluster
            for rank in range(setting.cluster.ranks)
        ]
        self._noises = setting.cluster.noises(setting.seed)
        self._stale = 0
        self._done = [0] * setting.cluster.ranks  # samples

    def claim_size(self, rank: int) -> int:
        """Return the size that a worker claims."""
        worker = self.workers[rank]
        # The rule balances updates: a worker that has made more of them than the others takes
        # larger batches.
        others = [w.updates for other, w in self.workers.items() if other != rank]
        return worker.sizer.next(worker.updates, [float(n) for n in others])

    def compute(self, rank: int, places: Sequence[int], second: float) -> float:
        """Compute a batch's gradients at the model as it is; return when they are done."""
        worker = self.workers[rank]
        worker.seen = self.record.steps
        worker.samples = len(places)
        if worker.model is not None:
            self._read(worker.model)
            worker.model.zero_grad()
            self.setting.task.loss(worker.model, torch.tensor(places)).backward()
        seconds = self._clusters[rank].compute_seconds(
            rank, self.setting.task.work_of(places), second, self._noises[rank]
        )
        self.record.busy[rank] += seconds
        return second + seconds

    @torch.no_grad()
    def _read(self, model: torch.nn.Module) -> None:
        """Copy the shared parameters to a worker's; buffers are each worker's own."""
        torch._foreach_copy_(list(model.parameters()), list(self.model.parameters()))

    def update(self, rank: int) -> None:
        """Step the shared model with a worker's gradients; the rate follows its batch."""
        worker, record = self.workers[rank], self.record
        own = worker.model.parameters() if worker.model is not None else repeat(None)
        finite = True
        # Not strict, as `repeat` has no end.
        for shared, parameter in zip(self.model.parameters(), own, strict=False):
            gradient = None if parameter is None else parameter.grad
            shared.grad = torch.zeros_like(shared) if gradient is None else gradient
            # All processes step the shared model alike: each has the whole of it.
            self.setting.ranks.broadcast(shared.grad, rank)
            finite &= bool(shared.grad.isfinite().all())
        # Per sample every batch counts alike: a large one steps as far as the small ones it stands
        # for.
        rate = self.setting.learning_rate * worker.samples / self.setting.global_batch
        self.optimizer.param_groups[0]["lr"] = rate
        # One bad batch must not ruin the shared model; it is a step all the same, as time went by.
        if finite:
            self.optimizer.step()
        record.skipped += not finite
        self._stale += record.steps - worker.seen
        worker.updates += 1
        record.steps += 1
        record.samples += worker.samples
        self._done[rank] += worker.samples

    def epoch(self, number: int) -> None:
        """Run an epoch: workers take its samples until all are done."""
        record, task = self.record, self.setting.task
        order = shuffled(task.samples, 1000 * self.setting.seed, number)
        before = {rank: worker.updates for rank, worker in self.workers.items()}
        events: list[tuple[float, int]] = []
        place = 0

        def begin(rank: int, second: float) -> None:
            nonlocal place
            if place < len(order):
                places = order[place : place + self.claim_size(rank)]
                place += len(places)
                heapq.heappush(events, (self.compute(rank, places, second), rank))

        for rank in self.workers:
            begin(rank, record.seconds)
        while events:
            record.seconds, rank = heapq.heappop(events)
            self.update(rank)
            begin(rank, record.seconds)
        record.updates.append(
            [
                self.workers[rank].updates - before[rank] if rank in self.workers else 0
                for rank in range(len(record.busy))
            ]
        )
        sizes = [w.sizer.size if (w := self.workers.get(r)) else 0 for r in range(len(record.busy))]
        record.sizes.append((record.seconds, sizes))
        accuracy, loss = self._evaluate()
        record.accuracy.append((record.seconds, accuracy))
        record.loss.append((record.seconds, loss))
        record.staleness = self._stale / record.steps
        record.used = {name: self._utilisation(name) for name in ("slow", "fast")}

    def _evaluate(self) -> list[float]:
        """Return the shared model's accuracy and loss, with the buffers of the first worker."""
        first, task = min(self.workers), self.setting.task
        found = torch.zeros(2, dtype=torch.float64)
        if (model := self.workers[first].model) is not None:
            self._read(model)
            found[0], found[1] = task.accuracy(model), mean_loss(task, model)
        self.setting.ranks.broadcast(found, first)
        numbers: list[float] = found.tolist()
        return numbers

    def _utilisation(self, name: str) -> float:
        """Return the work of a class's ranks as a share of the most that they could compute.

        At their largest batch, that is: a GPU that is busy with small ones is little used.
        """
        setting = self.setting
        size = setting.classes.sizes[name].largest
        ranks = [rank for rank in range(len(self._done)) if setting.classes.name(rank) == name]
        best = sum(
            size / (self._clusters[rank].overhead_seconds + size / setting.cluster.speeds[rank])
            for rank in ranks
        )
        done = sum(self._done[rank] for rank in ranks)
        return done / (best * self.record.seconds) if ranks else 0.0


def simulate(setting: Setting, mode: str, who: str = "all", adapts: bool = False) -> Record:
    """Train one shared model, and return what happened.

    who: "all" ranks, the "slow" ones only (Hogwild on CPUs), or the "fast" ones.
    """
    fast = setting.classes.fast
    ranks = [
        rank
        for rank in range(setting.cluster.ranks)
        if who == "all" or (rank in fast) == (who == "fast")
    ]
    run = Hogbatch(setting, mode, ranks, adapts)
    for number in range(setting.epochs):
        run.epoch(number)
    return run.record
