"""Setting: what all modes of one comparison share, and the Record that each of them makes.

The cluster is a model, not a clock: it has the seconds of a rank's batch and of the ranks'
reduction. Its ranks may be of classes, fast ones as GPUs are beside CPUs.

Tasks: networks and the real digits, trained by every mode alike.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Candidate, Network, predict

from ...adaptive.hogbatch.sizes import Thresholds
from ...compression import Compression, SparseCompression
from ..bench.harness import resnet18
from .ranks import Processes, Ranks, Threads


def perceptron() -> torch.nn.Module:
    """Return a perceptron of one hidden layer: 9,610 parameters."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def convolutions() -> torch.nn.Module:
    """Return a small convolutional network in the manner of those for CIFAR-10."""
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 10),
    )


class InColor(torch.nn.Module):
    """The digits as images of three equal channels, [n, 3, 8, 8], to a network for such."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        images = pixels.reshape(-1, 1, 8, 8).expand(-1, 3, -1, -1)
        scores: torch.Tensor = self.network(images)
        return scores


def residual() -> torch.nn.Module:
    """Return the whole ResNet-18 for CIFAR-10: 11,173,962 parameters."""
    return InColor(resnet18())


NETWORKS: Final[Mapping[str, Callable[[], torch.nn.Module]]] = {
    "digits": perceptron,
    "digits-cnn": convolutions,
    "digits-resnet18": residual,
}


TEST_IMAGES: Final = 360


class Task(Protocol):
    """A training task: model, data and measure.

    samples: how many there are. length: parameters whose exchange is modelled.
    """

    @property
    def samples(self) -> int: ...

    @property
    def length(self) -> int: ...

    def model(self) -> torch.nn.Module:
        """Return a model: the same one every time."""

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some samples."""

    def work_of(self, places: Sequence[int]) -> float:
        """Return the cost of a batch of the given samples, in samples of mean cost."""

    def accuracy(self, model: torch.nn.Module) -> float:
        """Return the share of the samples held back that a model names right."""


class Digits(NamedTuple):
    """A `Task`: images and labels, those held back, and a model from a seed.

    length: of the model, where it is not another's.
    """

    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    model: Callable[[], torch.nn.Module]
    length: int

    @property
    def samples(self) -> int:
        return len(self.y)

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(self.x[indices]), self.y[indices])

    def work_of(self, places: Sequence[int]) -> float:
        return len(places)  # all cost the same

    def accuracy(self, model: torch.nn.Module) -> float:
        with evaluated(model):
            return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


@contextmanager
def evaluated(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation: batch norm uses its running statistics."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def mean_loss(task: Task, model: torch.nn.Module) -> float:
    """Return the mean loss of all samples that are trained with."""
    with evaluated(model):
        return float(task.loss(model, torch.arange(task.samples)))


def open_task(name: str, seed: int, length: int | None = None) -> Digits:
    """Return a task; the seed splits the digits and draws the weights.

    length: of the gradient whose exchange is modelled, where it shall be another model's.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    # Pixels are 0..16.
    x = (torch.from_numpy(pixels).float() / 16 - 0.5)[order]
    y = torch.from_numpy(labels).long()[order]
    # Drawn once, as the global generator is shared by the threads that are ranks.
    torch.manual_seed(seed)
    first = NETWORKS[name]()
    return Digits(
        x[:-TEST_IMAGES],
        y[:-TEST_IMAGES],
        x[-TEST_IMAGES:],
        y[-TEST_IMAGES:],
        lambda: copy.deepcopy(first),
        length or sum(parameter.numel() for parameter in first.parameters()),
    )


@dataclass
class Record:
    """One mode and seed.

    seconds:   simulated, of the whole run.
    busy:      of these, the time that each rank computed.
    exchange:  of these, the time that the wire was in use, as modelled; of synchronous modes, the
               time that ranks waited for it.
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
    noise: standard deviation of the logarithm of a batch's seconds.
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
        """Return the number of ranks."""
        return len(self.speeds)

    def compute_seconds(
        self, rank: int, samples: float, second: float, random: np.random.Generator
    ) -> float:
        """Return the seconds of a batch that a rank begins at this simulated second.

        samples: their number, or their work, where some have more than others.
        """
        if samples == 0:
            return 0.0
        factor = 1.0
        for slowdown in self.slowdowns:
            if slowdown.rank == rank and second >= slowdown.second:
                factor *= slowdown.factor
        # Log-normal: a factor that is never negative, and slows down as often as it speeds up.
        noise = float(np.exp(self.noise * random.standard_normal()))
        return factor * noise * (self.overhead_seconds + samples / self.speeds[rank])

    def reduce_seconds(self, candidate: Candidate, length: int) -> float:
        """Return the seconds of a reduction on the wire, by its algorithm's schedule."""
        if self.exchange_seconds is not None:
            return self.exchange_seconds
        network = Network(self.ranks, self.link)
        # Only the wire's part of the prediction: the ranks' speeds give the time to compute.
        return predict(candidate, length, network, DEFAULT_RATES).communicate_seconds

    def signal_seconds(self) -> float:
        """Return the seconds until all ranks know that all are ready."""
        # A butterfly's rounds.
        return self.link.latency_seconds * (self.ranks - 1).bit_length()

    def noises(self, seed: int) -> list[np.random.Generator]:
        # A stream for each rank: its noise does not depend on how many batches others had.
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
        """Return the seconds of a synchronous step's reduction after its gradients are done."""
        return max(0.0, reduce_seconds - self.overlap * compute_seconds)

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.learning_rate, momentum=self.momentum)

    def is_due(self, samples: int, evaluations: int) -> bool:
        """Tell whether a model is to be evaluated again, that has seen so many samples."""
        every = self.evaluate_every or self.task.samples
        # Once more at the end, whatever `evaluate_every` is.
        return samples >= min((evaluations + 1) * every, self.epochs * self.task.samples)

    @property
    def compression(self) -> Any:
        """Return the optimizer's compression."""
        if self.density is None:
            return Compression.none
        return Compression.gtopk(density=self.density)

    @property
    def reduce_seconds(self) -> float:
        """Return the modelled seconds of a step's exchange on the wire."""
        compression = self.compression
        if isinstance(compression, SparseCompression):
            candidate = compression.candidate(compression.formats()[0])
        else:
            candidate = Candidate("dense")
        return self.cluster.reduce_seconds(candidate, self.task.length)

    @property
    def dense_seconds(self) -> float:
        """Return the modelled seconds of a dense exchange of a gradient."""
        return self.cluster.reduce_seconds(Candidate("dense"), self.task.length)
