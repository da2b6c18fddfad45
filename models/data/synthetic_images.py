"""Synthetic images of CIFAR-10's and ImageNet's shapes, with patterns to learn.

Each class is a coarse pattern of colours; an image is its class's pattern, enlarged, plus noise.
An image is generated from its number when its batch is made, so the set takes no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .labelled import LabelledBatch, LabelledData, LabelledSet

CELLS: Final = 8  # on a pattern's side
NOISE: Final = 2.0  # the noise's standard deviation, relative to the patterns'


class ImageShape(NamedTuple):
    """The shape of a published set; size: of the images, in pixels."""

    name: str
    size: int
    classes: int
    train: int
    test: int


CIFAR10: Final = ImageShape("CIFAR-10", 32, 10, 50_000, 10_000)
IMAGENET: Final = ImageShape("ImageNet", 224, 1000, 1_281_167, 50_000)


class SyntheticImages(LabelledSet):
    """count: number of images; first: the first one's number, so that training and test differ."""

    def __init__(self, shape: ImageShape, count: int, *, first: int = 0, seed: int = 0) -> None:
        self.shape, self.count, self.first, self.seed = shape, count, first, seed
        random = np.random.default_rng([seed, 0])
        patterns = random.standard_normal((shape.classes, 3, CELLS, CELLS), np.float32)
        self._patterns = torch.from_numpy(patterns)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, visits: Sequence[int]) -> LabelledBatch:
        size, inputs, labels = self.shape.size, [], []
        for visit in visits:
            random = np.random.default_rng([self.seed, 1, self.first + visit % self.count])
            labels.append(int(random.integers(self.shape.classes)))
            noise = random.standard_normal((3, size, size), np.float32)
            inputs.append(torch.from_numpy(NOISE * noise))
        targets = torch.tensor(labels)
        patterns = F.interpolate(self._patterns[targets], size=(size, size))
        return LabelledBatch((patterns + torch.stack(inputs)) / (1 + NOISE**2) ** 0.5, targets)


def synthesise_images(shape: ImageShape, samples: int | None = None, seed: int = 0) -> LabelledData:
    """Return a set like a published one; samples: for training, and a fifth as many for testing."""
    train, test = (shape.train, shape.test) if samples is None else (samples, -(-samples // 5))
    return LabelledData(
        SyntheticImages(shape, train, seed=seed),
        SyntheticImages(shape, test, first=train, seed=seed),
        shape.classes,
        f"synthetic, like {shape.name}",
    )
