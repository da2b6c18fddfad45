"""Setting: what all modes of one comparison share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from collectives.planning import Candidate

from ...compression import Compression, SparseCompression
from .classes import Classes
from .cluster import Cluster
from .ranks import Processes, Ranks, Threads
from .tasks import Task


@dataclass(frozen=True)
class Setting:
    """A cluster, a task, and how it is trained.

    density: of gTop-k; None: dense.
    max_batch: the largest that goodput may choose, of all ranks; 0: 8 global batches.
    mega_batch: samples between two merges of adaptive-sgd; 0: 100 batches.
    evaluate_every: samples; 0: after every epoch. Of hogbatch always so.
    overlap: the share of a batch's computation beside which synchronous modes exchange gradients,
        as they do in the backward pass.
    losses: whether the synchronous modes note the loss of all samples, too.
    classes: of ranks, for hogbatch.
    processes: that compute a rank each; None: this one computes all.
    """

    cluster: Cluster
    task: Task
    seed: int
    epochs: int
    global_batch: int
    learning_rate: float
    momentum: float
    density: float | None
    interval: int = 20
    micro_batch: int = 16
    max_batch: int = 0
    mega_batch: int = 0
    evaluate_every: int = 0
    overlap: float = 0.0
    losses: bool = False
    classes: Classes = field(default_factory=Classes)
    processes: Processes | None = None

    @property
    def ranks(self) -> Ranks:
        """Return who computes the ranks."""
        return self.processes or Threads(self.cluster.ranks)

    def wait_seconds(self, compute_seconds: float, reduce_seconds: float) -> float:
        """Return how long a synchronous step's reduction goes on when its gradients are done."""
        return max(0.0, reduce_seconds - self.overlap * compute_seconds)

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return a rank's optimizer."""
        return torch.optim.SGD(parameters, self.learning_rate, momentum=self.momentum)

    def is_due(self, samples: int, evaluations: int) -> bool:
        """Tell whether a model is to be evaluated again, that has seen so many samples."""
        every = self.evaluate_every or self.task.samples
        return samples >= min((evaluations + 1) * every, self.epochs * self.task.samples)

    @property
    def compression(self) -> Any:
        """Return what the optimizer compresses with."""
        if self.density is None:
            return Compression.none
        return Compression.gtopk(density=self.density)

    @property
    def reduce_seconds(self) -> float:
        """Return what the exchange of a step is modelled to take on the wire."""
        compression = self.compression
        if isinstance(compression, SparseCompression):
            candidate = compression.candidate(compression.formats()[0])
        else:
            candidate = Candidate("dense")
        return self.cluster.reduce_seconds(candidate, self.task.length)

    @property
    def dense_seconds(self) -> float:
        """Return what a dense exchange of a gradient is modelled to take."""
        return self.cluster.reduce_seconds(Candidate("dense"), self.task.length)
