"""Tasks: what the comparison of recipes trains, and how the end of a training is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F

from models.data.classification import load
from models.mlp import mlp


@dataclass(frozen=True)
class Task:
    """Samples, a model as it begins, and a score of how it ends; all from one seed.

    x, y:    training samples, float32 or int64 [n, ...], and what they should give, int64 [n, ...].
    batch:   samples of a step, of all ranks together.
    rate:    the learning rate of SGD at a share 0..1 of the training; AdamW takes adam_rate.
    score:   in percent; higher is better.
    """

    x: torch.Tensor
    y: torch.Tensor
    new_model: Callable[[], torch.nn.Module]
    score: Callable[[torch.nn.Module], float]
    epochs: int
    batch: int
    rate: Callable[[float], float]
    seed: int
    adam_rate: float = 1e-3
    weights: Mapping[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        object.__setattr__(self, "weights", self.new_model().state_dict())

    def model(self) -> torch.nn.Module:
        """Return the model as it begins."""
        model = self.new_model()
        model.load_state_dict(self.weights)
        return model

    def loss(self, model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some samples."""
        return F.cross_entropy(model(self.x[samples]).flatten(0, -2), self.y[samples].flatten())

    @property
    def steps(self) -> int:
        """Return how many steps the training takes."""
        return self.epochs * (len(self.x) // self.batch)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the samples of every step, in an order of the seed."""
        order = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            shuffled = torch.randperm(len(self.x), generator=order)
            yield from shuffled[: len(self.x) // self.batch * self.batch].split(self.batch)


@torch.no_grad()
def right(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of what a model names right, in percent."""
    model.eval()
    named = torch.cat([model(part).argmax(-1) for part in x.split(256)])
    model.train()
    return 100 * float((named == y).float().mean())


def digits(seed: int, epochs: int | None = None) -> Task:
    """Return scikit-learn's handwritten digits (real, small), for a perceptron of 85,002."""
    data = load("digits", seed)
    x, y = data.train.tensors
    test_x, test_y = data.test.tensors
    return Task(
        x,
        y,
        new_model=mlp,
        score=lambda model: right(model, test_x, test_y),
        epochs=epochs or 30,
        batch=128,
        rate=lambda share: 0.05,
        seed=seed,
    )


TASKS: Final[Mapping[str, Callable[[int, int | None], Task]]] = {
    "digits": digits,
}
