"""Join: shards as long as ranks are fast, equal batches; who has done its shard computes no more.

PyTorch's answer to uneven inputs (its context manager Join around DistributedDataParallel), with
losses weighted by samples and a dense allreduce:

    rank 0, fast   [b][b][b][b][b][b]      a step takes as long as the slowest rank that is in it
    rank 1         [b   ][b   ] .  .       . takes part with nothing
"""

from __future__ import annotations

import torch

from collectives.planning import Candidate

from ..adaptive.cuts import shuffled
from ..adaptive.shares import Limits, whole
from .record import Record
from .setting import Setting


def simulate(setting: Setting) -> Record:
    """Train with shards by the ranks' speeds, which are known beforehand."""
    cluster, task = setting.cluster, setting.task
    ranks = cluster.ranks
    record = Record("join", setting.seed, busy=[0.0] * ranks)
    model = task.model()
    optimizer = torch.optim.SGD(
        model.parameters(), setting.learning_rate, momentum=setting.momentum
    )
    batch = setting.global_batch // ranks
    noises = cluster.noises(setting.seed)
    reduce_seconds = cluster.reduce_seconds(Candidate("dense"), task.length)
    length = task.samples
    wanted = [length * speed / sum(cluster.speeds) for speed in cluster.speeds]
    shares = whole(wanted, Limits(length, [0] * ranks, [length] * ranks))
    for epoch in range(setting.epochs):
        order = torch.tensor(shuffled(length, 1000 * setting.seed, epoch))
        inputs = [shard.split(batch) for shard in order.split(shares)]
        for step in range(max(map(len, inputs))):
            batches = [shard[step] if step < len(shard) else order[:0] for shard in inputs]
            seconds = [
                cluster.compute_seconds(rank, len(mine), record.seconds, noises[rank])
                if len(mine)
                else 0.0
                for rank, mine in enumerate(batches)
            ]
            # The mean over all samples is what weighted losses sum up to.
            optimizer.zero_grad()
            task.loss(model, torch.cat(batches)).backward()
            optimizer.step()
            record.busy = [a + b for a, b in zip(record.busy, seconds, strict=True)]
            record.seconds += max(seconds) + reduce_seconds
            record.exchange += reduce_seconds
            record.samples += sum(map(len, batches))
            record.steps += 1
            record.sizes.append((record.seconds, list(map(len, batches))))
        record.accuracy.append((record.seconds, task.accuracy(model)))
    return record
