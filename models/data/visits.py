"""The order in which ranks visit samples; it depends on seed, epoch and rank alone.

    visit = epoch * samples + sample       the number of a visit

A data set that augments samples seeds its random numbers by the visit's number. So training resumes
to the bit wherever it was stopped, and with any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class Visits(Sampler[list[int]]):
    """Batches of one rank, of visits' numbers; a batch sampler for DataLoader.

    An epoch is a permutation of all samples, dealt out to the ranks, equally many to each: where
    the number does not divide, some samples are visited twice. A partial batch is left out.
    """

    def __init__(
        self, samples: int, batch_size: int, *, rank: int = 0, size: int = 1, seed: int = 0
    ) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.rank, self.size = rank, size
        self.epoch = self.first = 0

    @property
    def per_rank(self) -> int:
        """Return the number of samples that a rank is dealt in an epoch."""
        return -(-self.samples // self.size)

    def begin(self, epoch: int, first: int = 0) -> None:
        """Set the epoch of the next iteration, and the number of its first batch."""
        self.epoch, self.first = epoch, first

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)
        own = np.resize(order, self.per_rank * self.size)[self.rank :: self.size]
        visits = self.epoch * self.samples + own
        for batch in range(self.first, len(self)):
            yield visits[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.per_rank // self.batch_size
