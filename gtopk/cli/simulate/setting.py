"""The Setting that all modes of a comparison share, and the Record of each run.

The cluster is a model of time: it returns the seconds of a rank's batch and of a reduction. Its
ranks may form two classes, fast and slow, like GPUs and CPUs.

The tasks train networks on real handwritten digits, in the same way in every mode.
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
    """Return a perceptron with one hidden layer: 9,610 parameters."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def convolutions() -> torch.nn.Module:
    """Return a small convolutional network in the style of those for CIFAR-10."""
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
    """Feed the digits to a network for colour images: three equal channels, [n, 3, 8, 8]."""

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

    samples: number of training samples. length: parameters in the modelled exchange.
    """

    @property
    def samples(self) -> int: ...

    @property
    def length(self) -> int: ...

    def model(self) -> torch.nn.Module:
        """Return a new model, with the same weights each time."""

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some samples."""

    def work_of(self, places: Sequence[int]) -> float:
        """Return the cost of a batch of the given samples, in samples of mean cost."""

    def accuracy(self, model: torch.nn.Module) -> float:
        """Return the fraction of the test samples that a model classifies correctly."""


class Digits(NamedTuple):
    """A `Task`: training images and labels, test images and labels, and a model.

    length: parameters in the modelled exchange; by default the model's own.
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
        return len(places)  # all samples cost the same

    def accuracy(self, model: torch.nn.Module) -> float:
        with evaluated(model):
            return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


@contextmanager
def evaluated(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, so that batch norm uses its running statistics."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def mean_loss(task: Task, model: torch.nn.Module) -> float:
    """Return the mean loss of all training samples."""
    with evaluated(model):
        return float(task.loss(model, torch.arange(task.samples)))


def open_task(name: str, seed: int, length: int | None = None) -> Digits:
    """Return a task; the seed splits the digits and draws the weights.

    length: parameters in the modelled exchange, to model another network's gradient.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    # Pixels are in 0..16.
    x = (torch.from_numpy(pixels).float() / 16 - 0.5)[order]
    y = torch.from_numpy(labels).long()[order]
    # Draw the weights once, here: threads of several ranks share the global generator.
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
    """The record of one mode and seed.

    seconds:   simulated time of the whole run.
    busy:      part of it that each rank computed.
    exchange:  part of it that the modelled wire was in use; in synchronous modes, that ranks waited
               for it.
    samples:   computed by all ranks together.
    steps:     updates of the parameters; with replicas, summed over merges, those of the rank with
               the most.
    skipped:   number of non-finite results left out: an update, which still counts as a step, or a
               replica's contribution to a merge.
    accuracy:  (simulated seconds, fraction of the test samples) after every epoch, or more often.
    sizes:     (simulated seconds, samples of each rank in the step that ended then); dead ranks: 0.
    updates:   of each rank, between two merges of replicas, or in an epoch of hogbatch.
    loss:      (simulated seconds, mean loss of the training samples) after every epoch, if known.
    staleness: hogbatch: mean number of updates between reading the model and updating it.
    used:      hogbatch: utilisation of each class, relative to its largest batch.
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
        """Return the mean fraction of time that ranks computed."""
        return statistics.fmean(self.busy) / self.seconds

    @property
    def least_utilisation(self) -> float:
        """Return the least fraction of time that a rank computed, excluding time on the wire.

        In a delayed mode, time on the wire counts, as ranks should compute during it.
        """
        hidden = self.mode == "abs"
        return min(self.busy) / (self.seconds - (0.0 if hidden else self.exchange))

    @property
    def final_accuracy(self) -> float:
        """Return the accuracy after the last epoch."""
        return self.accuracy[-1][1]

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the second at which an accuracy was first reached; None: never."""
        return next((second for second, reached in self.accuracy if reached >= accuracy), None)

    def seconds_to_loss(self, loss: float) -> float | None:
        """Return the second at which a loss was first reached; None: never."""
        return next((second for second, reached in self.loss if reached <= loss), None)


@dataclass(frozen=True)
class Classes:
    """The classes of a cluster's ranks; only hogbatch uses them.

    fast: the fast ranks; the others are slow.
    overhead_seconds: per batch of a fast rank; None: the cluster's.
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
    """From a second on, a rank computes `factor` times as long."""

    rank: int
    factor: float
    second: float


@dataclass(frozen=True)
class Death:
    """A rank dies at a second."""

    rank: int
    second: float


@dataclass(frozen=True)
class Cluster:
    """A modelled cluster: b samples take a rank (overhead + b / speed) seconds, times noise.

    speeds: samples a second, by rank.
    deaths: of ranks; only modes with merged replicas survive them.
    overhead_seconds: per batch, independent of its size.
    noise: standard deviation of the logarithm of a batch's seconds.
    link: between any two ranks; each is on its own node.
    exchange_seconds: of a reduction; overrides the time from the link's model.
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

        samples: their number, or their work if samples differ in cost.
        """
        if samples == 0:
            return 0.0
        factor = 1.0
        for slowdown in self.slowdowns:
            if slowdown.rank == rank and second >= slowdown.second:
                factor *= slowdown.factor
        # Log-normal: the factor is positive, and slows down as often as it speeds up.
        noise = float(np.exp(self.noise * random.standard_normal()))
        return factor * noise * (self.overhead_seconds + samples / self.speeds[rank])

    def reduce_seconds(self, candidate: Candidate, length: int) -> float:
        """Return the seconds of a reduction on the wire, from its algorithm's schedule."""
        if self.exchange_seconds is not None:
            return self.exchange_seconds
        network = Network(self.ranks, self.link)
        # Only the wire's part: the ranks' speeds cover the time to compute.
        return predict(candidate, length, network, DEFAULT_RATES).communicate_seconds

    def signal_seconds(self) -> float:
        """Return the seconds until all ranks know that all are ready."""
        # log2 rounds, as in a butterfly.
        return self.link.latency_seconds * (self.ranks - 1).bit_length()

    def noises(self, seed: int) -> list[np.random.Generator]:
        # A stream per rank, so that its noise does not depend on other ranks' batches.
        return [np.random.default_rng([seed, rank]) for rank in range(self.ranks)]


@dataclass(frozen=True)
class Setting:
    """A cluster, a task, and the training options.

    density: of gTop-k; None: dense.
    max_batch: the largest global batch that goodput may choose; 0: 8 global batches.
    mega_batch: samples between two merges of adaptive-sgd; 0: 100 batches.
    evaluate_every: samples; 0: after every epoch. Hogbatch always evaluates after every epoch.
    overlap: the fraction of a batch's computation during which synchronous modes exchange
        gradients, as in the backward pass.
    losses: whether the synchronous modes also record the loss of all samples.
    classes: of ranks, for hogbatch.
    processes: each computes one rank; None: this process computes all.
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
        """Return the object that runs the ranks."""
        return self.processes or Threads(self.cluster.ranks)

    def wait_seconds(self, compute_seconds: float, reduce_seconds: float) -> float:
        """Return the seconds of a synchronous reduction that the computation does not hide."""
        return max(0.0, reduce_seconds - self.overlap * compute_seconds)

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.learning_rate, momentum=self.momentum)

    def is_due(self, samples: int, evaluations: int) -> bool:
        """Tell whether to evaluate a model again, after this many samples and evaluations."""
        every = self.evaluate_every or self.task.samples
        # Always evaluate at the end, whatever `evaluate_every` is.
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
