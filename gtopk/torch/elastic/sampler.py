"""ElasticSampler: deals the rest of an epoch out to the present number of ranks.

    the epoch's order     7 2 9 4 0 8 5 1 6 3      a permutation that every rank knows
    3 ranks, 1 batch      7 2 9|4 0 8|             batches of 2: rank 0 takes 7 4, 1: 2 0, 2: 9 8
    2 ranks go on                     5 1 6 3      rank 0 takes 5 6, rank 1: 1 3

The processed samples are always the first ones of the order, so their number is the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from ..mpi_ops import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """A DistributedSampler that remembers the processed samples, also when the ranks change.

    Call `record_batch` for each batch processed, and `set_epoch` at the end of an epoch; as a part
    of a TorchState it is committed, restored and dealt out anew with the rest.

    Every sample is processed once in an epoch, whatever the numbers of ranks meanwhile. Where the
    rest does not divide by their number, its first samples come again at the very end, so that all
    ranks take as many steps.

    dataset: of a constant size, the same on every rank.
    seed: of the order, equal on all ranks; every epoch has its own.
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no sample is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as processed, of this size on every rank."""
        # All ranks' samples: the state must not depend on how many there are.
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return how far the epoch is, in numbers that hold for any number of ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from what `state_dict` returned, here or on other ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the samples that are not processed out to the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        length = len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset does not promise it
        if self.shuffle:
            # On the host, whatever the default device is: all ranks must draw the same order.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator, device="cpu").tolist()
        else:
            order = list(range(length))
        self.remaining_indices: list[int] = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples; all ranks have equally many."""
        remaining = self.remaining_indices
        for place in range(self.rank, self.total_size, self.num_replicas):
            # From the beginning again: all ranks must take as many steps, or one would wait for the
            # rest.
            yield remaining[place % len(remaining)]

    def __len__(self) -> int:
        """Return how many samples this rank has left."""
        return self.num_samples
