"""Forked children are no ranks: DataLoader's workers come and go, and cannot communicate."""

import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gtopk.torch as hvd


class Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(ValueError, match=f"forked from rank {OWN}"):
            hvd.rank()
        return torch.tensor([float(index)])


hvd.init()
OWN = hvd.rank()
for _ in range(2):
    for batch in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        total = hvd.allreduce(batch.sum(), op=hvd.Sum)
        assert total == hvd.size() * batch.sum()
