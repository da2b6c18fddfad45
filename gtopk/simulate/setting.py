"""Setting: what all modes of one comparison share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from collectives.planning import Candidate

from ..compression import Compression, SparseCompression
from .classes import Classes
from .cluster import Cluster
from .tasks import Task


@dataclass(frozen=True)
class Setting:
    """A cluster, a task, and how it is trained.

    density: of gTop-k; None: dense.
    max_batch: the largest that goodput may choose, of all ranks; 0: 8 global batches.
    mega_batch: samples between two merges of adaptive-sgd; 0: 100 batches.
    evaluate_every: samples, of replicas; 0: after every epoch.
    classes: of ranks, for hogbatch.
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
    classes: Classes = field(default_factory=Classes)

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
            assert self.density is not None
            candidate = Candidate(compression.algorithm, self.density, compression.formats()[0])
        else:
            candidate = Candidate("dense")
        return self.cluster.reduce_seconds(candidate, self.task.length)

    @property
    def probe_seconds(self) -> float:
        """Return what a dense exchange of a gradient is modelled to take."""
        return self.cluster.reduce_seconds(Candidate("dense"), self.task.length)
