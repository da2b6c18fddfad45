"""The order in which ranks visit samples: a function of seed, epoch and rank, and of nothing else.

    visit = epoch * samples + sample       which sample, and for the how many-th time

A data set that draws at random, to augment, draws from the visit's number: training goes on to the
bit wherever it was stopped, and it is all the same how many workers load.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class Visits(Sampler[list[int]]):
    """Batches of one rank, of visits' numbers; a batch sampler for DataLoader.

    An epoch is a permutation of all samples, dealt out to the ranks, as many to each: where they do
    not come out even, some samples are visited twice. What fills no batch is left out.
    """

    def __init__(
        self, samples: int, batch_size: int, *, rank: int = 0, size: int = 1, seed: int = 0
    ) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.rank, self.size = rank, size
        self.epoch = self.first = 0

    @property
    def per_rank(self) -> int:
        """How many samples a rank is dealt in an epoch."""
        return -(-self.samples // self.size)

    def begin(self, epoch: int, first: int = 0) -> None:
        """Choose the epoch of the next iteration, and which of its batches comes first."""
        self.epoch, self.first = epoch, first

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)
        own = np.resize(order, self.per_rank * self.size)[self.rank :: self.size]
        visits = self.epoch * self.samples + own
        for batch in range(self.first, len(self)):
            yield visits[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return self.per_rank // self.batch_size
