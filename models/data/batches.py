"""Data sets of labelled rows for DataLoader, which take a whole batch from the arrays at once.

    DataLoader(SparseDataset(rows), batch_size=256, collate_fn=as_batch)

DataLoader calls `__getitems__` for a whole batch, so there is nothing to collate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from .rows import LabelledRows

B = TypeVar("B")


class SparseBatch(NamedTuple):
    """Rows in EmbeddingBag's format, and their labels.

    indices: int64 [entries]; values: float32 [entries]; offsets: int64 [rows], where rows begin.
    labels: int64 [labels]; label_rows: int64 [labels], each one's row, ascending.
    """

    indices: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    labels: torch.Tensor
    label_rows: torch.Tensor

    @property
    def rows(self) -> int:
        """Return the number of samples."""
        return len(self.offsets)

    def to(self, device: torch.device) -> SparseBatch:
        """Return the batch on a device."""
        return SparseBatch(*(part.to(device) for part in self))


class DenseBatch(NamedTuple):
    """inputs: float32 [rows, features]; targets: int64 classes [rows], or float32 [rows, labels] of
    zeros and ones."""

    inputs: torch.Tensor
    targets: torch.Tensor


class SparseDataset(Dataset[SparseBatch]):
    """Rows by number, each scaled to Euclidean length 1, in sparse batches."""

    def __init__(self, rows: LabelledRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> SparseBatch:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int]) -> SparseBatch:
        rows = self.rows.take(np.asarray(numbers, np.int64))
        features, labels = rows.features, rows.labels
        lengths = features.lengths()
        lengths[lengths == 0] = 1
        values = features.values / lengths[features.row_of_entry()]
        return SparseBatch(
            torch.from_numpy(features.indices.astype(np.int64)),
            torch.from_numpy(values.astype(np.float32)),
            torch.from_numpy(features.offsets[:-1].copy()),
            torch.from_numpy(labels.indices.astype(np.int64)),
            torch.from_numpy(labels.row_of_entry()),
        )


class DenseDataset(Dataset[DenseBatch]):
    """Rows by number, in dense batches, for fully connected networks.

    multilabel: targets are zeros and ones for all labels, instead of one class for a row.
    Otherwise raises ValueError unless each row has exactly one class.
    """

    def __init__(self, rows: LabelledRows, *, multilabel: bool) -> None:
        self.rows = rows
        self.multilabel = multilabel
        if not multilabel and (np.diff(rows.labels.offsets) != 1).any():
            raise ValueError(f"{rows.origin}: every row must have one class; use multilabel=True")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> DenseBatch:
        inputs, targets = self.__getitems__([number])
        return DenseBatch(inputs[0], targets[0])

    def __getitems__(self, numbers: Sequence[int]) -> DenseBatch:
        rows = self.rows.take(np.asarray(numbers, np.int64))
        inputs = torch.from_numpy(rows.features.to_dense())
        classes = torch.from_numpy(rows.labels.indices.astype(np.int64))
        if not self.multilabel:
            return DenseBatch(inputs, classes)
        targets = torch.zeros(len(rows), rows.labels.width)
        targets[torch.from_numpy(rows.labels.row_of_entry()), classes] = 1
        return DenseBatch(inputs, targets)


def as_batch(batch: B) -> B:
    """Return the batch unchanged: this module's data sets return whole batches."""
    return batch
