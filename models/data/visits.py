"""The order in which ranks visit samples, which depends only on seed, epoch and rank.

    visit = epoch * samples + sample       the number of a visit

A data set that augments samples seeds its random numbers by the visit's number. So training can be
stopped and resumed anywhere, with any number of workers, with bit-identical results.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class Visits(Sampler[list[int]]):
    """A batch sampler for DataLoader: the batches of one rank, as visits' numbers.

    An epoch is a permutation of all samples, dealt out equally to the ranks. If their number is not
    divisible by the ranks', some samples are visited twice. A partial batch is left out.
    """

    def __init__(
        self, samples: int, batch_size: int, *, rank: int = 0, size: int = 1, seed: int = 0
    ) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.rank, self.size = rank, size
        self.epoch = self.first = 0

    @property
    def per_rank(self) -> int:
        """Return the number of samples that a rank gets in an epoch."""
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
