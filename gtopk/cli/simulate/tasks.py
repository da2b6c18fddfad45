"""Tasks: networks and the real digits, trained by every mode alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ..bench.workloads import resnet18


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
        """Return what a batch of some samples costs, in samples of the mean cost."""

    def accuracy(self, model: torch.nn.Module) -> float:
        """Return the share of the samples held back that a model names right."""


class Digits(NamedTuple):
    """Images and labels, those held back, and a model from a seed.

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
        """Return how many images are trained with."""
        return len(self.y)

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some samples."""
        return F.cross_entropy(model(self.x[indices]), self.y[indices])

    def work_of(self, places: Sequence[int]) -> float:
        """Return what a batch of some samples costs, in samples: all cost alike."""
        return len(places)

    def accuracy(self, model: torch.nn.Module) -> float:
        """Return the share of the samples held back that a model names right."""
        with evaluated(model):
            return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


@contextmanager
def evaluated(model: torch.nn.Module) -> Iterator[None]:
    """Have a model as one that is used: batch norm by the statistics that it has gathered."""
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
