"""Tasks: small models and the real digits, trained by every mode alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F

TEST_IMAGES: Final = 360


class Task(Protocol):
    """What is trained.

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

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> float:
        """Return the share of the samples held back that a model names right."""
        return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


@torch.no_grad()
def mean_loss(task: Task, model: torch.nn.Module) -> float:
    """Return the mean loss of all samples that are trained with."""
    return float(task.loss(model, torch.arange(task.samples)))


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


NETWORKS: Final[Mapping[str, Callable[[], torch.nn.Module]]] = {
    "digits": perceptron,
    "digits-cnn": convolutions,
}


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
    weights = NETWORKS[name]().state_dict()

    def model() -> torch.nn.Module:
        made = NETWORKS[name]()
        made.load_state_dict(weights)
        return made

    parameters = sum(tensor.numel() for tensor in weights.values())
    return Digits(
        x[:-TEST_IMAGES],
        y[:-TEST_IMAGES],
        x[-TEST_IMAGES:],
        y[-TEST_IMAGES:],
        model,
        length or parameters,
    )
