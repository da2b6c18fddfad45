"""Images that fit into memory: kept as bytes, normalised and augmented batch by batch.

    bytes [n, channels, rows, columns] --take--> --pad 4, crop, mirror--> --normalise--> float32

Random draws for a batch depend only on its visits' numbers (`visits`), so they are the same in
every run, and with any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from .labelled import LabelledBatch, LabelledSet

PADDING: Final = 4  # pixels on each side, to crop from


class ImageArrays(LabelledSet):
    """images: uint8 [n, channels, rows, columns]; labels: int64 [n]; mean, deviation: by channel.

    augmented: pad, crop and mirror the images at random.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float],
        deviation: Sequence[float],
        *,
        augmented: bool = False,
        seed: int = 0,
    ) -> None:
        self.images, self.labels = images, labels
        self.augmented, self.seed = augmented, seed
        # (byte / 255 - mean) / deviation
        self._factor = (1 / (255 * np.array(deviation, np.float32))).reshape(-1, 1, 1)
        self._mean = (255 * np.array(mean, np.float32)).reshape(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, visits: Sequence[int]) -> LabelledBatch:
        numbers = np.asarray(visits) % len(self)
        images = self.images[numbers]
        if self.augmented:
            images = augment(images, np.random.default_rng([self.seed, *visits[:1]]))
        inputs = (images.astype(np.float32) - self._mean) * self._factor
        return LabelledBatch(torch.from_numpy(inputs), torch.from_numpy(self.labels[numbers]))


def augment(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the images shifted at random by up to PADDING pixels, about half of them mirrored."""
    count, _, rows, columns = images.shape
    border = (PADDING, PADDING)
    padded = np.pad(images, ((0, 0), (0, 0), border, border))
    down, right = random.integers(0, 2 * PADDING + 1, (2, count, 1))
    row = down + np.arange(rows)
    column = right + np.arange(columns)
    mirrored = random.random((count, 1)) < 0.5
    column = np.where(mirrored, column[:, ::-1], column)
    moved: np.ndarray = padded.transpose(0, 2, 3, 1)[
        np.arange(count)[:, None, None], row[:, :, None], column[:, None, :]
    ]
    by_channel: np.ndarray = moved.transpose(0, 3, 1, 2)
    return by_channel
