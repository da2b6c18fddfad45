"""ElasticSampler: distributes the rest of an epoch over the current number of ranks.

    the epoch's order     7 2 9 4 0 8 5 1 6 3      a permutation that every rank knows
    3 ranks, 1 batch      7 2 9|4 0 8|             batches of 2: rank 0 takes 7 4, 1: 2 0, 2: 9 8
    2 ranks go on                     5 1 6 3      rank 0 takes 5 6, rank 1: 1 3

Processed samples are always the first ones of the order, so their number is the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from ..mpi_ops import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """A DistributedSampler that remembers the processed samples when the ranks change.

    Call `record_batch` after each batch, and `set_epoch` at the end of an epoch. Pass the sampler
    to a TorchState, which commits and restores it, and redistributes the samples.

    Every sample is processed once in an epoch, even if the number of ranks changes. If the number
    of remaining samples is not a multiple of the ranks, the first of them are repeated at the end,
    so that all ranks take equally many steps.

    dataset: must have a constant size, the same on every rank.
    seed: for the order; must be equal on all ranks. Each epoch has its own order.
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of this size as processed on every rank."""
        # Count all ranks' samples: the state must not depend on the number of ranks.
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, valid for any number of ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume from a state that `state_dict` returned, here or on other ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the unprocessed samples over the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        length = len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset does not promise it
        if self.shuffle:
            # On the host, not the default device: all ranks must draw the same order.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator, device="cpu").tolist()
        else:
            order = list(range(length))
        self.remaining_indices: list[int] = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples; all ranks yield equally many."""
        remaining = self.remaining_indices
        for place in range(self.rank, self.total_size, self.num_replicas):
            # Wrap around: all ranks must take equally many steps, or some would wait for the
            # others.
            yield remaining[place % len(remaining)]

    def __len__(self) -> int:
        """Return the number of samples that this rank has left."""
        return self.num_samples
