"""The modes that a comparison may hold, by name; those of common steps are here.

Synchronous modes: the library as it is, on real ranks, with a modelled timer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from torch.utils.data import DataLoader

from collectives.transports import Transport

from ...adaptive.adapt import adapt
from ...optim.distributed import DistributedOptimizer
from ...runtime.world import world
from ...telemetry.step_report import StepReport
from . import delayed, hogbatch, replicas
from .setting import Record, Setting, mean_loss

# Steps of a window that never fills: batches stay equal.
NEVER = 1_000_000_000


class Clock:
    """One rank's view of the simulated seconds: ranks wait for each other after every batch.

    probes: every so many steps a dense allreduce measures the noise.
    """

    def __init__(self, setting: Setting, record: Record, probes: int) -> None:
        self.cluster = setting.cluster
        self.record = record
        self._setting = setting
        self._reduce_seconds = setting.reduce_seconds
        self._probes, self._probe_seconds = probes, setting.dense_seconds
        record.busy = [0.0] * self.cluster.ranks

    def end_step(self, samples: int, seconds: float) -> None:
        """Note what every rank has computed; returns when all are at the end of their step."""
        batches = gathered("simulated.step", samples, seconds)
        record, longest = self.record, max(taken for _, taken in batches)
        # A synchronous step is as long as its slowest rank, and then the exchange that it did not
        # hide.
        waited = self._setting.wait_seconds(longest, self._reduce_seconds)
        if self._probes != NEVER and record.steps % self._probes == 0:
            waited += self._probe_seconds
        record.seconds += longest + waited
        record.exchange += waited
        record.steps += 1
        sizes = [int(size) for size, _ in batches]
        # What a rank computed, without what it waited for slower ones.
        record.busy = [a + b for a, (_, b) in zip(record.busy, batches, strict=True)]
        record.samples += sum(sizes)
        record.sizes.append((record.seconds, sizes))


def gathered(name: str, *numbers: float) -> list[list[float]]:
    def work(transport: Transport, all_flags: list[int]) -> list[list[float]]:
        return transport.gather_object(numbers)

    result: list[list[float]] = world.current().engine.submit(name, [], work).wait()
    return result


class ModelledTimer:
    """Tells the loader what the cluster's model says of a batch."""

    def __init__(self, clock: Clock, rank: int, random: np.random.Generator) -> None:
        self._clock, self._rank, self._random = clock, rank, random
        self.seconds = 0.0

    def start(self, samples: int) -> None:
        """Model the batch that begins now."""
        self.seconds = self._clock.cluster.compute_seconds(
            self._rank, samples, self._clock.record.seconds, self._random
        )

    def elapsed_seconds(self) -> float | None:
        return self.seconds

    def exchanged(self, step: StepReport) -> float:
        """Return the mean seconds that a step has waited for the wire so far."""
        return self._clock.record.exchange / self._clock.record.steps


def adapting(setting: Setting, mode: str) -> dict[str, Any]:
    """Return how the sizes of a mode's batches change."""
    if mode == "equal":
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


def in_steps(setting: Setting, mode: str) -> Record:
    """Train with equal or balanced batches, and return what happened."""
    return setting.ranks.train(partial(train, setting, mode))


def train(setting: Setting, mode: str) -> Record:
    """Train as the rank that this is, and return what happened on all of them.

    Rank 0 alone evaluates its model, and knows how good it is.
    """
    cluster, task = setting.cluster, setting.task
    record = Record(mode, setting.seed)
    options = adapting(setting, mode)
    clock = Clock(setting, record, options.get("noise_every", NEVER))
    rank = world.current().rank
    timer = ModelledTimer(clock, rank, cluster.noises(setting.seed)[rank])
    model = task.model()
    optimizer = DistributedOptimizer(
        setting.optimizer(model.parameters()),
        model.named_parameters(),
        setting.compression,
        # The record counts skipped steps; a mode that diverges is a result, and no error.
        max_skipped_steps=NEVER,
    )
    loader = adapt(
        # A data set of indices: the task has the samples, and takes those that it is told.
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


def equal_dense(setting: Setting) -> Record:
    """Train with equal batches and a dense allreduce: data parallelism as it usually is."""
    record = in_steps(replace(setting, density=None), "equal")
    return replace(record, mode="equal-dense")


def merged(setting: Setting, mode: str, **options: Any) -> Record:
    """Train replicas whose models are merged whole."""
    return replicas.simulate(replace(setting, density=None), mode, **options)


def adaptive(setting: Setting, mode: str, run: Callable[..., Record]) -> Record:
    """Train replicas by Adaptive SGD, with mega-batches as long as the setting says."""
    return run(setting, mode, mega_batch=setting.mega_batch)


SIMULATED: Final[Mapping[str, Callable[[Setting], Record]]] = {
    "equal-dense": equal_dense,
    "equal": partial(in_steps, mode="equal"),
    "balanced": partial(in_steps, mode="balanced"),
    "goodput": partial(in_steps, mode="goodput"),
    "abs": delayed.simulate,
    "local-sgd": partial(merged, mode="local-sgd", algorithm="k-step"),
    "elastic": partial(merged, mode="elastic", algorithm="elastic"),
    "crossbow": partial(merged, mode="crossbow", algorithm="crossbow"),
    "adaptive-sgd": partial(adaptive, mode="adaptive-sgd", run=merged),
    "adaptive-sgd-gtopk": partial(adaptive, mode="adaptive-sgd-gtopk", run=replicas.simulate),
    "slow-only": partial(hogbatch.simulate, mode="slow-only", who="slow"),
    "fast-only": partial(hogbatch.simulate, mode="fast-only", who="fast"),
    "hogbatch": partial(hogbatch.simulate, mode="hogbatch"),
    "adaptive-hogbatch": partial(hogbatch.simulate, mode="adaptive-hogbatch", adapts=True),
}
DEFAULT: Final = ("equal-dense", "equal", "balanced", "abs", "local-sgd", "adaptive-sgd")
# These exchange whole gradients or models, whatever the density.
DENSE: Final = ("equal-dense", "local-sgd", "elastic", "crossbow", "adaptive-sgd")
# A rank that dies is the end of any other.
OUTLIVE: Final = ("local-sgd", "elastic", "crossbow", "adaptive-sgd", "adaptive-sgd-gtopk")
# These train one model in classes of ranks, and are compared by its loss.
OF_CLASSES: Final = ("slow-only", "fast-only", "hogbatch", "adaptive-hogbatch")
