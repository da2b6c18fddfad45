"""Local SGD: every rank steps for itself, and the parameters are averaged now and then."""

from __future__ import annotations

import torch

from collectives.planning import Candidate

from ..adaptive.cuts import shuffled
from .record import Record
from .setting import Setting

LOCAL_STEPS = 8  # between two averages


def simulate(setting: Setting) -> Record:
    """Train with equal local batches and a dense average of the parameters."""
    cluster, task = setting.cluster, setting.task
    ranks = cluster.ranks
    record = Record("local-sgd", setting.seed, busy=[0.0] * ranks)
    models = [task.model() for _ in range(ranks)]
    optimizers = [
        torch.optim.SGD(model.parameters(), setting.learning_rate, momentum=setting.momentum)
        for model in models
    ]
    batch = setting.global_batch // ranks
    noises = cluster.noises(setting.seed)
    average_seconds = cluster.reduce_seconds(Candidate("dense"), task.length)
    since = [0.0] * ranks  # seconds that each rank has computed since the last average
    for epoch in range(setting.epochs):
        order = torch.tensor(shuffled(len(task.y), 1000 * setting.seed, epoch))
        steps = -(-len(order) // setting.global_batch)
        for step in range(steps):
            together = order[step * setting.global_batch :][: setting.global_batch]
            for rank, indices in enumerate(together.split(batch)[:ranks]):
                optimizers[rank].zero_grad()
                task.loss(models[rank], indices).backward()
                optimizers[rank].step()
                second = record.seconds + since[rank]
                since[rank] += cluster.compute_seconds(rank, len(indices), second, noises[rank])
                record.samples += len(indices)
            record.steps += 1
            if record.steps % LOCAL_STEPS == 0 or step == steps - 1:
                average(models)
                record.busy = [a + b for a, b in zip(record.busy, since, strict=True)]
                record.seconds += max(since) + average_seconds
                record.exchange += average_seconds
                record.sizes.append((record.seconds, [batch] * ranks))
                since = [0.0] * ranks
        record.accuracy.append((record.seconds, task.accuracy(models[0])))
    return record


@torch.no_grad()
def average(models: list[torch.nn.Module]) -> None:
    """Make every model the mean of all."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack(list(parameters)).mean(0)
        for parameter in parameters:
            parameter.copy_(mean)
