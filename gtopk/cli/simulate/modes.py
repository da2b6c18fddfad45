"""The modes that a comparison may hold, by name.

Join: shards as long as ranks are fast, equal batches; who has done its shard computes no more.

PyTorch's answer to uneven inputs (its context manager Join around DistributedDataParallel), with
losses weighted by samples and a dense allreduce:

    rank 0, fast   [b][b][b][b][b][b]      a step takes as long as the slowest rank that is in it
    rank 1         [b   ][b   ] .  .       . takes part with nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from collectives.cost_model import Candidate
from collectives.transports import Transport

from ...adaptive.local_training.replica import RoundExchange
from ...adaptive.partitioning.cuts import Limits, shuffled, whole
from ...compression import Compression
from . import delayed, hogbatch, replicas, synchronous
from .setting import Record, Setting


class Rank:
    """A rank's replica.

    skipped: steps that no rank made, as a gradient was not finite.
    """

    def __init__(self, setting: Setting) -> None:
        self._task = setting.task
        self.model = setting.task.model()
        self._parameters = list(self.model.parameters())
        self._optimizer = setting.optimizer(self._parameters)
        self._exchange = RoundExchange(self._parameters, Compression.none)
        self.skipped = 0

    def step(self, batch: torch.Tensor, total: int, transport: Transport) -> None:
        """Step by the mean over all ranks' samples, as losses weighted by samples make it."""
        self._optimizer.zero_grad()
        if len(batch):
            (len(batch) * self._task.loss(self.model, batch)).backward()
        self._exchange.take([parameter.grad for parameter in self._parameters])
        update = self._exchange.reduce(transport, 1.0 / total)
        if update is None:  # not finite, on all ranks
            self.skipped += 1
            return
        for parameter, gradient in zip(self._parameters, update, strict=True):
            parameter.grad = gradient
        self._optimizer.step()


def take_step(
    here: Mapping[int, Rank], batches: Sequence[torch.Tensor], transport: Transport
) -> None:
    """Have the rank that this is take its part in a step."""
    here[transport.rank].step(batches[transport.rank], sum(map(len, batches)), transport)


def simulate(setting: Setting) -> Record:
    """Train with shards by the ranks' speeds, which are known beforehand."""
    cluster, task = setting.cluster, setting.task
    ranks = range(cluster.ranks)
    record = Record("join", setting.seed, busy=[0.0] * cluster.ranks)
    here = {rank: Rank(setting) for rank in setting.ranks.here}
    batch = setting.global_batch // cluster.ranks
    noises = cluster.noises(setting.seed)
    reduce_seconds = cluster.reduce_seconds(Candidate("dense"), task.length)
    length = task.samples
    wanted = [length * speed / sum(cluster.speeds) for speed in cluster.speeds]
    shares = whole(wanted, Limits(length, [0] * cluster.ranks, [length] * cluster.ranks))
    for epoch in range(setting.epochs):
        order = torch.tensor(shuffled(length, 1000 * setting.seed, epoch))
        inputs = [shard.split(batch) for shard in order.split(shares)]
        for step in range(max(map(len, inputs))):
            batches = [shard[step] if step < len(shard) else order[:0] for shard in inputs]
            sizes = list(map(len, batches))
            setting.ranks.meet(ranks, partial(take_step, here, batches))
            seconds = [
                cluster.compute_seconds(rank, size, record.seconds, noises[rank])
                for rank, size in enumerate(sizes)
            ]
            record.busy = [a + b for a, b in zip(record.busy, seconds, strict=True)]
            waited = setting.wait_seconds(max(seconds), reduce_seconds)
            record.seconds += max(seconds) + waited
            record.exchange += waited
            record.samples += sum(sizes)
            record.steps += 1
            record.sizes.append((record.seconds, sizes))
            if 0 in here and setting.is_due(record.samples, len(record.accuracy)):
                record.accuracy.append((record.seconds, task.accuracy(here[0].model)))
    record.skipped = next(iter(here.values())).skipped
    return record


def equal_dense(setting: Setting) -> Record:
    """Train with equal batches and a dense allreduce: data parallelism as it usually is."""
    record = synchronous.simulate(replace(setting, density=None), "equal")
    return replace(record, mode="equal-dense")


def merged(setting: Setting, mode: str, **options: Any) -> Record:
    """Train replicas whose models are merged whole."""
    return replicas.simulate(replace(setting, density=None), mode, **options)


def adaptive(setting: Setting, mode: str, run: Callable[..., Record]) -> Record:
    """Train replicas by Adaptive SGD, with mega-batches as long as the setting says."""
    return run(setting, mode, mega_batch=setting.mega_batch)


SIMULATED: Final[Mapping[str, Callable[[Setting], Record]]] = {
    "equal-dense": equal_dense,
    "equal": partial(synchronous.simulate, mode="equal"),
    "balanced": partial(synchronous.simulate, mode="balanced"),
    "goodput": partial(synchronous.simulate, mode="goodput"),
    "abs": delayed.simulate,
    "join": simulate,
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
DENSE: Final = ("equal-dense", "join", "local-sgd", "elastic", "crossbow", "adaptive-sgd")
# A rank that dies is the end of any other.
OUTLIVE: Final = ("local-sgd", "elastic", "crossbow", "adaptive-sgd", "adaptive-sgd-gtopk")
# These train one model in classes of ranks, and are compared by its loss.
OF_CLASSES: Final = ("slow-only", "fast-only", "hogbatch", "adaptive-hogbatch")
