"""Sparse rows in memory, in compressed sparse row (CSR) format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of numbers, most of them 0, in CSR format.

    Row i has values[j] in column indices[j], for every j in offsets[i] .. offsets[i + 1] - 1.

    offsets: int64 [rows + 1], from 0, not decreasing.
    indices: int32 [entries], ascending within a row, in 0 .. width - 1.
    values:  float32 [entries].
    """

    offsets: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    width: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> SparseRows:
        """Return a copy of these rows, in this order."""
        offsets, places = _places(self.offsets, rows)
        return SparseRows(offsets, self.indices[places], self.values[places], self.width)

    def to_dense(self) -> np.ndarray:
        """Return float32 [rows, width]."""
        dense = np.zeros((len(self), self.width), np.float32)
        dense[self.row_of_entry(), self.indices] = self.values
        return dense

    def row_of_entry(self) -> np.ndarray:
        """Return the row of each entry, int64 [entries]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def lengths(self) -> np.ndarray:
        """Return each row's Euclidean length, float64 [rows]."""
        squares = np.square(self.values, dtype=np.float64)
        return np.sqrt(np.bincount(self.row_of_entry(), squares, minlength=len(self)))


@dataclass(frozen=True, eq=False)
class LabelLists:
    """The labels of each row: those of row i are indices[offsets[i]:offsets[i + 1]].

    offsets: int64 [rows + 1], from 0, not decreasing.
    indices: int32 [entries], distinct within a row, in 0 .. width - 1.
    """

    offsets: np.ndarray
    indices: np.ndarray
    width: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> LabelLists:
        """Return a copy of these rows' labels, in this order."""
        offsets, places = _places(self.offsets, rows)
        return LabelLists(offsets, self.indices[places], self.width)

    def row_of_entry(self) -> np.ndarray:
        """Return the row of each label, int64 [entries]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """A data set, or a batch of it: rows of features, with a list of labels for each.

    origin: names its source, to be shown with every figure.
    """

    features: SparseRows
    labels: LabelLists
    origin: str

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: np.ndarray) -> LabelledRows:
        """Return a copy of these rows, in this order."""
        return LabelledRows(self.features.take(rows), self.labels.take(rows), self.origin)


def concatenated(parts: Sequence[LabelledRows], origin: str) -> LabelledRows:
    """Return the rows of all parts; at least one, all of the same widths."""
    features, labels = [part.features for part in parts], [part.labels for part in parts]
    return LabelledRows(
        SparseRows(
            _chained([part.offsets for part in features]),
            np.concatenate([part.indices for part in features]),
            np.concatenate([part.values for part in features]),
            features[0].width,
        ),
        LabelLists(
            _chained([part.offsets for part in labels]),
            np.concatenate([part.indices for part in labels]),
            labels[0].width,
        ),
        origin,
    )


def _chained(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the offsets of all parts, one after the other."""
    counts = np.concatenate([np.diff(offsets) for offsets in parts])
    return np.concatenate([[0], np.cumsum(counts)])


def _places(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of the rows taken, and the indices of their entries."""
    begins = offsets[rows]
    counts = offsets[np.asarray(rows) + 1] - begins
    taken = np.concatenate([[0], np.cumsum(counts)])
    return taken, np.arange(taken[-1]) + np.repeat(begins - taken[:-1], counts)
