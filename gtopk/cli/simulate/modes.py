"""The modes of a comparison, by name.

This file has the synchronous modes, which run the real library on real ranks with a modelled timer,
and the modes with one shared model on a node (Hogbatch).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader

from collectives.transports import Transport

from ...adaptive.adapt import adapt
from ...adaptive.hogbatch.sizes import Sizer
from ...adaptive.partitioning.cuts import shuffled
from ...optim.distributed import DistributedOptimizer
from ...runtime.world import world
from ...telemetry.step_report import StepReport
from . import delayed, replicas
from .setting import Record, Setting, mean_loss

# A window of this many steps never fills, so batches stay equal.
NEVER = 1_000_000_000


class Clock:
    """One rank's simulated clock; ranks wait for each other after every batch.

    probe_interval: number of steps between dense allreduces that measure the gradient noise.
    """

    def __init__(self, setting: Setting, record: Record, probe_interval: int) -> None:
        self.cluster = setting.cluster
        self.record = record
        self._setting = setting
        self._reduce_seconds = setting.reduce_seconds
        self._probe_interval, self._probe_seconds = probe_interval, setting.dense_seconds
        record.busy = [0.0] * self.cluster.ranks

    def end_step(self, samples: int, seconds: float) -> None:
        """Record every rank's batch; wait until all ranks have finished their step."""
        batches = gather_numbers("simulated.step", samples, seconds)
        record, longest = self.record, max(taken for _, taken in batches)
        # A synchronous step takes as long as its slowest rank plus the exchange that is not hidden.
        waited = self._setting.wait_seconds(longest, self._reduce_seconds)
        if self._probe_interval != NEVER and record.steps % self._probe_interval == 0:
            waited += self._probe_seconds
        record.seconds += longest + waited
        record.exchange += waited
        record.steps += 1
        sizes = [int(size) for size, _ in batches]
        # Count only computing, not waiting for slower ranks.
        record.busy = [a + b for a, (_, b) in zip(record.busy, batches, strict=True)]
        record.samples += sum(sizes)
        record.sizes.append((record.seconds, sizes))


def gather_numbers(name: str, *numbers: float) -> list[list[float]]:
    def work(transport: Transport, all_flags: list[int]) -> list[list[float]]:
        return transport.gather_object(numbers)

    result: list[list[float]] = world.current().engine.submit(name, [], work).wait()
    return result


class ModelledTimer:
    """A timer for the loader that returns the modelled seconds of a batch."""

    def __init__(self, clock: Clock, rank: int, random: np.random.Generator) -> None:
        self._clock, self._rank, self._random = clock, rank, random
        self.seconds = 0.0

    def start(self, samples: int) -> None:
        """Compute the modelled seconds of the batch that begins now."""
        self.seconds = self._clock.cluster.compute_seconds(
            self._rank, samples, self._clock.record.seconds, self._random
        )

    def elapsed_seconds(self) -> float | None:
        return self.seconds

    def exchanged(self, step: StepReport) -> float:
        """Return the mean seconds that a step has waited for the wire so far."""
        return self._clock.record.exchange / self._clock.record.steps


def adapt_options(setting: Setting, mode: str) -> dict[str, Any]:
    """Return a mode's options of `adapt` for changing batch sizes."""
    if mode in ("equal", "equal-dense"):
        return {"interval": NEVER}
    if mode == "balanced":
        return {"interval": setting.interval}
    return {
        "interval": setting.interval,
        "policy": "goodput",
        "lr_scaling": "adascale",
        "max_global_batch": setting.max_batch or 8 * setting.global_batch,
        "noise_every": 2 * setting.interval,
    }


def train_in_steps(setting: Setting, mode: str) -> Record:
    """Train in a synchronous mode, and return the record.

    "equal-dense" is plain data parallelism: equal batches with a dense allreduce.
    """
    if mode == "equal-dense":
        setting = replace(setting, density=None)
    return setting.ranks.train(partial(train, setting, mode))


def train(setting: Setting, mode: str) -> Record:
    """Train as one rank, and return the record of all ranks.

    Only rank 0 evaluates its model, so only its record has accuracies.
    """
    cluster, task = setting.cluster, setting.task
    record = Record(mode, setting.seed)
    options = adapt_options(setting, mode)
    clock = Clock(setting, record, options.get("noise_every", NEVER))
    rank = world.current().rank
    timer = ModelledTimer(clock, rank, cluster.noises(setting.seed)[rank])
    model = task.model()
    optimizer = DistributedOptimizer(
        setting.optimizer(model.parameters()),
        model.named_parameters(),
        setting.compression,
        # Do not raise for skipped steps: the record counts them, and divergence is a valid result.
        max_skipped_steps=NEVER,
    )
    loader = adapt(
        # A data set of indices, as the task itself looks up the samples.
        DataLoader(range(task.samples), 1, shuffle=True),  # type: ignore[arg-type]
        optimizer,
        global_batch=setting.global_batch,
        **options,
        seed=1000 * setting.seed,
        timer=timer,
    )
    for _ in range(setting.epochs):
        for indices in loader:
            optimizer.zero_grad()
            task.loss(model, indices).backward()
            optimizer.step()
            clock.end_step(loader.num_samples, timer.seconds)
            if rank == 0 and setting.is_due(record.samples, len(record.accuracy)):
                record.accuracy.append((record.seconds, task.accuracy(model)))
                if setting.losses:
                    record.loss.append((record.seconds, mean_loss(task, model)))
    record.skipped = optimizer.skipped_steps
    return record


def train_replicas(setting: Setting, mode: str, **options: Any) -> Record:
    """Train replicas with dense merges of whole models."""
    return replicas.simulate(replace(setting, density=None), mode, **options)


class Worker:
    """One rank, with a copy of the model from when it took its batch, and the gradients there.

    model: None if it is in another process.
    version_read: number of updates of the shared model when the rank read it.
    """

    def __init__(self, model: torch.nn.Module | None, sizer: Sizer) -> None:
        self.model = model
        self.sizer = sizer
        self.updates = self.version_read = self.samples = 0


class Hogbatch:
    """The shared model, which every process has, and the workers by rank.

    Gradients are real, and as stale as the workers' speeds make them:

    worker   claims, reads the model at t | ... | its update reaches the model at t + seconds
    """

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
        self._staleness_sum = 0
        self._samples = [0] * setting.cluster.ranks

    def compute(self, rank: int, places: Sequence[int], second: float) -> float:
        """Compute a batch's gradients at the current model; return the second of completion."""
        worker = self.workers[rank]
        worker.version_read = self.record.steps
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
        """Step the shared model with a worker's gradients; the learning rate follows the batch."""
        worker, record = self.workers[rank], self.record
        own = worker.model.parameters() if worker.model is not None else repeat(None)
        finite = True
        # Not strict, as `repeat` has no end.
        for shared, parameter in zip(self.model.parameters(), own, strict=False):
            gradient = None if parameter is None else parameter.grad
            shared.grad = torch.zeros_like(shared) if gradient is None else gradient
            # Every process holds the shared model, so all must make the same step.
            self.setting.ranks.broadcast(shared.grad, rank)
            finite &= bool(shared.grad.isfinite().all())
        # Scale the rate with the batch, so that a large batch steps as far as the small ones that
        # it replaces.
        rate = self.setting.learning_rate * worker.samples / self.setting.global_batch
        self.optimizer.param_groups[0]["lr"] = rate
        # A bad batch must not ruin the shared model; still count it as a step, as it took time.
        if finite:
            self.optimizer.step()
        record.skipped += not finite
        self._staleness_sum += record.steps - worker.version_read
        worker.updates += 1
        record.steps += 1
        record.samples += worker.samples
        self._samples[rank] += worker.samples

    def epoch(self, number: int) -> None:
        """Run an epoch: workers take batches until all samples are done."""
        record, task = self.record, self.setting.task
        order = shuffled(task.samples, 1000 * self.setting.seed, number)
        before = {rank: worker.updates for rank, worker in self.workers.items()}
        events: list[tuple[float, int]] = []
        place = 0

        def begin(rank: int, second: float) -> None:
            nonlocal place
            if place < len(order):
                # A worker that has made more updates than the others gets larger batches.
                own = self.workers[rank]
                others = [each.updates for each in self.workers.values() if each is not own]
                places = order[place : place + own.sizer.next(own.updates, others)]
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
        record.staleness = self._staleness_sum / record.steps
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
        """Return the work of a class's ranks as a fraction of their maximum throughput.

        That is the throughput at their largest batch: a GPU busy with small batches is underused.
        """
        setting = self.setting
        size = setting.classes.sizes[name].largest
        ranks = [rank for rank in range(len(self._samples)) if setting.classes.name(rank) == name]
        best = sum(
            size / (self._clusters[rank].overhead_seconds + size / setting.cluster.speeds[rank])
            for rank in ranks
        )
        done = sum(self._samples[rank] for rank in ranks)
        return done / (best * self.record.seconds) if ranks else 0.0


def one_model(setting: Setting, mode: str, workers: str = "all", adapts: bool = False) -> Record:
    """Train one shared model, and return the record.

    workers: "all" ranks, only the "slow" ones (Hogwild on CPUs), or only the "fast" ones.
    """
    fast = setting.classes.fast
    ranks = [
        rank
        for rank in range(setting.cluster.ranks)
        if workers == "all" or (rank in fast) == (workers == "fast")
    ]
    run = Hogbatch(setting, mode, ranks, adapts)
    for number in range(setting.epochs):
        run.epoch(number)
    return run.record


SIMULATED: Final[Mapping[str, Callable[[Setting], Record]]] = {
    **{
        mode: partial(train_in_steps, mode=mode)
        for mode in ("equal-dense", "equal", "balanced", "goodput")
    },
    "abs": delayed.simulate,
    "local-sgd": partial(train_replicas, mode="local-sgd", algorithm="k-step"),
    "elastic": partial(train_replicas, mode="elastic", algorithm="elastic"),
    "crossbow": partial(train_replicas, mode="crossbow", algorithm="crossbow"),
    "adaptive-sgd": partial(train_replicas, mode="adaptive-sgd"),
    "adaptive-sgd-gtopk": partial(replicas.simulate, mode="adaptive-sgd-gtopk"),
    "slow-only": partial(one_model, mode="slow-only", workers="slow"),
    "fast-only": partial(one_model, mode="fast-only", workers="fast"),
    "hogbatch": partial(one_model, mode="hogbatch"),
    "adaptive-hogbatch": partial(one_model, mode="adaptive-hogbatch", adapts=True),
}
DEFAULT: Final = ("equal-dense", "equal", "balanced", "abs", "local-sgd", "adaptive-sgd")
# These exchange whole gradients or models and ignore the density.
DENSE: Final = ("equal-dense", "local-sgd", "elastic", "crossbow", "adaptive-sgd")
# These continue if a rank dies; other modes end.
SURVIVE_DEATHS: Final = ("local-sgd", "elastic", "crossbow", "adaptive-sgd", "adaptive-sgd-gtopk")
# These train one model with classes of ranks, and are compared by loss.
OF_CLASSES: Final = ("slow-only", "fast-only", "hogbatch", "adaptive-hogbatch")
