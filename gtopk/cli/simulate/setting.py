"""Setting: what all modes of one comparison share, and the Record that each of them makes.

The cluster is a model, not a clock: it has the seconds of a rank's batch and of the ranks'
reduction. Its ranks may be of classes, fast ones as GPUs are beside CPUs.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Candidate, Network, predict

from ...adaptive.hogbatch.sizes import Thresholds
from ...compression import Compression, SparseCompression
from .ranks import Processes, Ranks, Threads
from .tasks import Task


@dataclass
class Record:
    """One mode and seed.

    seconds:   simulated, of the whole run.
    busy:      of these, what each rank computed.
    exchange:  of these, what the wire was in use, as modelled; of synchronous modes, what ranks
               waited for it.
    samples:   computed, of all ranks.
    steps:     updates of the parameters; of replicas, those of the rank that makes most.
    skipped:   how often what was computed was left out, as it was not finite: an update, which
               counts as a step all the same, or what a replica brought to a merge.
    accuracy:  (simulated seconds, share of the test samples) after every epoch, or more often.
    sizes:     (simulated seconds, samples of each rank in the step that ended then); 0 of the dead.
    updates:   of each rank, between two merges of replicas, or in an epoch of hogbatch.
    loss:      (simulated seconds, mean loss of the training samples) after every epoch, if known.
    staleness: of hogbatch: others' updates between an update's reading of the model and itself.
    used:      of hogbatch: the share of what each class can compute that it did.
    """

    mode: str
    seed: int
    seconds: float = 0.0
    busy: list[float] = field(default_factory=list)
    exchange: float = 0.0
    samples: int = 0
    steps: int = 0
    skipped: int = 0
    accuracy: list[tuple[float, float]] = field(default_factory=list)
    sizes: list[tuple[float, list[int]]] = field(default_factory=list)
    updates: list[list[int]] = field(default_factory=list)
    loss: list[tuple[float, float]] = field(default_factory=list)
    staleness: float = 0.0
    used: dict[str, float] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Return the simulated throughput."""
        return self.samples / self.seconds

    @property
    def utilisation(self) -> float:
        """Return the mean share of time that ranks computed."""
        return statistics.fmean(self.busy) / self.seconds

    @property
    def least_utilisation(self) -> float:
        """Return the least share that a rank computed, of the time it was not on the wire.

        Of a delayed mode, of the whole time: there the wire is no excuse.
        """
        hidden = self.mode == "abs"
        return min(self.busy) / (self.seconds - (0.0 if hidden else self.exchange))

    @property
    def final_accuracy(self) -> float:
        """Return the accuracy after the last epoch."""
        return self.accuracy[-1][1]

    def seconds_to(self, accuracy: float) -> float | None:
        """Return when an accuracy was first reached; None: never."""
        return next((second for second, reached in self.accuracy if reached >= accuracy), None)

    def seconds_to_loss(self, loss: float) -> float | None:
        """Return when a loss was first reached; None: never."""
        return next((second for second, reached in self.loss if reached <= loss), None)


@dataclass(frozen=True)
class Classes:
    """The part of a cluster that only hogbatch needs.

    fast: ranks; the others are slow.
    overhead_seconds: of a fast rank's every batch; None: the cluster's.
    sizes: the smallest and the largest batch of "slow" and "fast".
    """

    fast: Collection[int] = (0,)
    overhead_seconds: float | None = None
    sizes: Mapping[str, Thresholds] = field(
        default_factory=lambda: {"slow": Thresholds(4, 64), "fast": Thresholds(32, 256)}
    )

    def name(self, rank: int) -> str:
        """Return the class of a rank."""
        return "fast" if rank in self.fast else "slow"


GIGABIT: Final = Link.of(1e9, 50e-6)


@dataclass(frozen=True)
class Slowdown:
    """A rank computes `factor` times as long from a second on."""

    rank: int
    factor: float
    second: float


@dataclass(frozen=True)
class Death:
    """A rank is gone from a second on."""

    rank: int
    second: float


@dataclass(frozen=True)
class Cluster:
    """A batch of b samples takes a rank (overhead + b / speed) seconds, times the noise.

    speeds: samples a second, by rank.
    deaths: of ranks; only replicas that are merged can go on without one.
    overhead_seconds: of every batch, whatever its size.
    noise: standard deviation of the logarithm of what a batch takes.
    link: between any two ranks; each sits on a node of its own.
    exchange_seconds: of a reduction, in place of what the link's model says.
    """

    speeds: Sequence[float]
    overhead_seconds: float = 0.0
    noise: float = 0.0
    slowdowns: Sequence[Slowdown] = ()
    deaths: Sequence[Death] = ()
    link: Link = GIGABIT
    exchange_seconds: float | None = None

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return len(self.speeds)

    def compute_seconds(
        self, rank: int, samples: float, second: float, random: np.random.Generator
    ) -> float:
        """Return what a batch takes that a rank begins at a second.

        samples: or their work, where some have more than others.
        """
        if samples == 0:
            return 0.0
        factor = 1.0
        for slowdown in self.slowdowns:
            if slowdown.rank == rank and second >= slowdown.second:
                factor *= slowdown.factor
        noise = float(np.exp(self.noise * random.standard_normal()))
        return factor * noise * (self.overhead_seconds + samples / self.speeds[rank])

    def reduce_seconds(self, candidate: Candidate, length: int) -> float:
        """Return what a reduction takes on the wire, by the schedule of its algorithm."""
        if self.exchange_seconds is not None:
            return self.exchange_seconds
        network = Network(self.ranks, self.link)
        return predict(candidate, length, network, DEFAULT_RATES).communicate_seconds

    def signal_seconds(self) -> float:
        """Return what it takes until all ranks know that all are ready."""
        return self.link.latency_seconds * (self.ranks - 1).bit_length()

    def noises(self, seed: int) -> list[np.random.Generator]:
        """Return every rank's source of noise."""
        return [np.random.default_rng([seed, rank]) for rank in range(self.ranks)]


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
