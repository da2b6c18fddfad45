"""Tasks: the data, models and scores for comparing recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F

from models.data.classification import Classification, load
from models.data.digit_images import load_digit_images
from models.data.docstrings import load_code, load_docstrings
from models.data.lanes import Text
from models.data.text_windows import TextWindows
from models.digits_cnn import digits_cnn
from models.gpt import Gpt
from models.lstm_ptb import LstmLanguageModel
from models.mlp import mlp
from models.resnet_cifar import resnet20

# x, y, test_x, test_y of a task.
Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def call(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a model's scores of the classes, for a model that returns nothing else."""
    scores: torch.Tensor = model(x)
    return scores


@dataclass(frozen=True)
class Task:
    """Samples, an initial model, and a score of the trained model; all from one seed.

    x, y:           training samples, float32 or int64 [n, ...], and their classes, int64 [n, ...].
    test_x, test_y: the same, held out.
    batch:          samples per step, over all ranks.
    rate:           the learning rate of SGD with momentum, at a share 0..1 of the training.
    adam_rate:      the same, of AdamW.
    scores:         computes a model's scores of samples, [n, ..., classes].
    """

    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    new_model: Callable[[], torch.nn.Module]
    epochs: int
    batch: int
    rate: Callable[[float], float]
    adam_rate: Callable[[float], float]
    seed: int
    scores: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] = call
    weights: Mapping[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        object.__setattr__(self, "weights", self.new_model().state_dict())

    def model(self) -> torch.nn.Module:
        model = self.new_model()
        model.load_state_dict(self.weights)
        return model

    def loss(self, model: torch.nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the given samples."""
        scores = self.scores(model, self.x[numbers])
        return F.cross_entropy(scores.flatten(0, -2), self.y[numbers].flatten())

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> float:
        """Return the share of held-out samples that a model classifies correctly, in percent."""
        model.eval()
        named = [self.scores(model, part).argmax(-1) for part in self.test_x.split(256)]
        model.train()
        return 100 * float((torch.cat(named) == self.test_y).float().mean())

    @property
    def steps(self) -> int:
        """Return the number of steps in the training."""
        return self.epochs * (len(self.x) // self.batch)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the samples of every step, in the seed's order."""
        order = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            shuffled = torch.randperm(len(self.x), generator=order)
            yield from shuffled[: len(self.x) // self.batch * self.batch].split(self.batch)


def constant(rate: float) -> Callable[[float], float]:
    """Return a constant learning rate."""
    return lambda share: rate


def falling(rate: float) -> Callable[[float], float]:
    """Return a learning rate that is a tenth after half of the training, a hundredth at 3/4."""
    return lambda share: rate * 0.1 ** ((share >= 0.5) + (share >= 0.75))


def warmed(rate: float) -> Callable[[float], float]:
    """Return a learning rate that rises in the first tenth, then falls as a cosine to 0."""

    def at(share: float) -> float:
        rising = 10.0 * share + 1e-3  # above 0 in the first step
        return rate * min(rising, (1.0 + math.cos(math.pi * share)) / 2.0)

    return at


def samples(data: Classification) -> Samples:
    """Return the samples of a task."""
    x, y = data.train.tensors
    test_x, test_y = data.test.tensors
    return x, y, test_x, test_y


def of_digits(
    data: Classification,
    new_model: Callable[[], torch.nn.Module],
    epochs: int,
    rate: Callable[[float], float],
    seed: int,
) -> Task:
    """Return a task of the digits in a given form."""
    return Task(
        *samples(data),
        new_model=new_model,
        epochs=epochs,
        batch=128,
        rate=rate,
        adam_rate=constant(1e-3),
        seed=seed,
    )


def digits(seed: int, epochs: int = 30) -> Task:
    """Return scikit-learn's handwritten digits (real, small), for a perceptron of 85,002."""
    return of_digits(load("digits", seed), mlp, epochs, constant(0.05), seed)


def small_cnn(seed: int, epochs: int = 30) -> Task:
    """Return the same digits for convolutions: 22,602 parameters."""
    return of_digits(load_digit_images(seed=seed), digits_cnn, epochs, constant(0.05), seed)


def residual_network(seed: int, epochs: int = 16, *, pixels: int = 16) -> Task:
    """Return the same digits, enlarged to `pixels` a side, in three colours, for ResNet-20.

    269,722 parameters; batch norm uses a rank's own samples.
    """
    data = load_digit_images(pixels, 3, seed=seed)
    return of_digits(data, resnet20, epochs, falling(0.05), seed)


def windows(text: Text, length: int, seed: int) -> Samples:
    """Return a text's windows of `length` bytes, and their next ones; 512 are held out."""

    def cut(tokens: torch.Tensor, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        parts = TextWindows(tokens, length)
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed))
        return parts.__getitems__(order[:count].tolist())

    return *cut(text.train, None), *cut(text.test, 512)


def language_model(seed: int, epochs: int = 2) -> Task:
    """Return docstrings for an LSTM that predicts the next byte: 2 layers, 329,984 parameters."""
    return Task(
        *windows(load_docstrings(), 32, seed),
        new_model=lambda: LstmLanguageModel(256, width=128, dropout=0.0),
        epochs=epochs,
        batch=64,
        rate=constant(1.0),
        seed=seed,
        adam_rate=constant(3e-3),
        scores=lambda model, x: model(x)[0],
    )


def transformer(seed: int, epochs: int = 2, *, adam_rate: Callable[[float], float]) -> Task:
    """Return docstrings for a GPT that predicts the next byte: 3 blocks, 168,512 parameters."""
    return Task(
        *windows(load_docstrings(), 32, seed),
        new_model=lambda: Gpt(context=32, width=64, layers=3),
        epochs=epochs,
        batch=64,
        rate=constant(0.1),
        seed=seed,
        adam_rate=adam_rate,
    )


def larger_transformer(seed: int, epochs: int = 2) -> Task:
    """Return the standard library's code (real) for a GPT: 3 blocks, 1,076,712 parameters."""
    return Task(
        *windows(load_code(), 64, seed),
        new_model=lambda: Gpt(context=64, width=168, layers=3),
        epochs=epochs,
        batch=32,
        rate=constant(0.1),
        seed=seed,
        adam_rate=warmed(2e-3),
    )


# Functions of a seed and, optionally, a number of epochs other than the task's own.
TASKS: Final[Mapping[str, Callable[..., Task]]] = {
    "digits": digits,
    "digits-cnn": small_cnn,
    "resnet20": residual_network,
    "resnet20, CIFAR's shape": partial(residual_network, pixels=32),
    "lstm": language_model,
    "gpt": partial(transformer, adam_rate=constant(1e-3)),
    "gpt, cosine": partial(transformer, adam_rate=warmed(3e-3)),
    "larger gpt, cosine": larger_transformer,
}
