"""Labelled samples for classification, in batches by the numbers of visits (`visits`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import TensorDataset

from .classification import Classification


class LabelledBatch(NamedTuple):
    """inputs: float32 [n, ...]; targets: int64 classes [n]."""

    inputs: torch.Tensor
    targets: torch.Tensor


class LabelledSet(Protocol):
    """A data set for DataLoader whose `__getitems__` returns a whole batch, by visits' numbers."""

    def __len__(self) -> int: ...

    def __getitems__(self, visits: Sequence[int]) -> LabelledBatch: ...

    def __getitem__(self, visit: int) -> LabelledBatch:
        return self.__getitems__([visit])


class LabelledData(NamedTuple):
    """Training and test data. origin: names its source, to be shown with every figure."""

    train: LabelledSet
    test: LabelledSet
    classes: int
    origin: str


class TensorSet(LabelledSet):
    """A data set of tensors, by visits."""

    def __init__(self, data: TensorDataset) -> None:
        self.inputs, self.targets = data.tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, visits: Sequence[int]) -> LabelledBatch:
        numbers = torch.from_numpy(np.asarray(visits) % len(self))
        return LabelledBatch(self.inputs[numbers], self.targets[numbers])


def labelled(data: Classification, origin: str) -> LabelledData:
    """Return classification data by visits."""
    return LabelledData(TensorSet(data.train), TensorSet(data.test), data.classes, origin)
