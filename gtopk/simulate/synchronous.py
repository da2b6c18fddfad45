"""Synchronous modes: the library as it is, on ranks that are threads, with a modelled timer."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch.utils.data import DataLoader

from collectives.transports import LocalTransport, local_world, run_ranks

from .. import world
from ..adaptive.adapt import adapt
from ..optimizer import DistributedOptimizer
from .cluster import Cluster
from .record import Record
from .setting import Setting
from .tasks import mean_loss

NEVER = 1_000_000_000  # steps of a window that never fills: batches stay equal


class Clock:
    """The simulated seconds of ranks that wait for each other after every batch."""

    def __init__(self, cluster: Cluster, reduce_seconds: float, record: Record) -> None:
        self.cluster = cluster
        self.record = record
        self._reduce_seconds = reduce_seconds
        self._batches = [(0, 0.0)] * cluster.ranks
        # Nobody waits for a rank that has failed: it breaks the barrier.
        self._barrier = threading.Barrier(cluster.ranks, self._advance)
        record.busy = [0.0] * cluster.ranks

    def end_step(self, rank: int, samples: int, seconds: float) -> None:
        """Return when every rank is at the end of its step."""
        self._batches[rank] = samples, seconds
        self._barrier.wait()

    def _advance(self) -> None:
        record = self.record
        record.seconds += max(seconds for _, seconds in self._batches) + self._reduce_seconds
        record.exchange += self._reduce_seconds
        record.steps += 1
        for rank, (samples, seconds) in enumerate(self._batches):
            record.busy[rank] += seconds
            record.samples += samples
        record.sizes.append((record.seconds, [samples for samples, _ in self._batches]))

    def abort(self) -> None:
        """Let no rank wait any more."""
        self._barrier.abort()


class ModelledTimer:
    """Tells the loader what the cluster's model says of a batch."""

    def __init__(self, clock: Clock, rank: int, random: np.random.Generator) -> None:
        self._clock, self._rank, self._random = clock, rank, random
        self.seconds = 0.0

    def hand_over(self, samples: int) -> None:
        """Model the batch that begins now."""
        self.seconds = self._clock.cluster.compute_seconds(
            self._rank, samples, self._clock.record.seconds, self._random
        )

    def take(self) -> float | None:
        """Return what it took."""
        return self.seconds


def simulate(setting: Setting, mode: str) -> Record:
    """Train with equal or balanced batches, and return what happened."""
    record = Record(mode, setting.seed)
    cluster, task = setting.cluster, setting.task
    clock = Clock(cluster, setting.reduce_seconds, record)
    noises = cluster.noises(setting.seed)

    def rank(transport: LocalTransport) -> None:
        number = transport.rank
        timer = ModelledTimer(clock, number, noises[number])
        try:
            with world.entered(transport):
                model = task.model()
                optimizer = DistributedOptimizer(
                    torch.optim.SGD(
                        model.parameters(), setting.learning_rate, momentum=setting.momentum
                    ),
                    model.named_parameters(),
                    setting.compression,
                )
                loader = adapt(
                    DataLoader(range(task.samples), 1, shuffle=True),  # type: ignore[arg-type]
                    optimizer,
                    global_batch=setting.global_batch,
                    interval=setting.interval if mode == "balanced" else NEVER,
                    seed=1000 * setting.seed,
                    timer=timer,
                )
                for _ in range(setting.epochs):
                    for indices in loader:
                        optimizer.zero_grad()
                        task.loss(model, indices).backward()
                        optimizer.step()
                        clock.end_step(number, loader.num_samples, timer.seconds)
                        if number == 0 and setting.is_due(record.samples, len(record.accuracy)):
                            record.accuracy.append((record.seconds, task.accuracy(model)))
                            if setting.losses:
                                record.loss.append((record.seconds, mean_loss(task, model)))
        except BaseException:
            clock.abort()
            raise

    run_ranks(local_world(cluster.ranks), rank)
    return record
