"""Tables: the data sets for fully connected networks, by name.

Batches are dense, but rows stay sparse in memory: dense, all of real-sim would take 6 GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from models.data import load
from models.data.batches import DenseDataset
from models.data.catalogue import Shape, read_libsvm, shape_of
from models.data.classification import TEST_SHARE
from models.data.labelled import TensorSet
from models.data.libsvm import read_multilabel
from models.data.rows import LabelledRows
from models.data.synthetic_tables import synthesise_table
from models.data.synthetic_xml import synthesise
from models.data.xml import read_xml

TABLES = ("covtype", "w8a", "real-sim", "delicious")  # as in Ma and Rusu 2020
_AT_ONCE: Final = 1024  # rows evaluated together: 86 MB of real-sim

Batch = tuple[torch.Tensor, torch.Tensor]


class Samples(Protocol):
    """A data set for a DataLoader with `as_batch`: fetches a batch by its samples' numbers."""

    def __len__(self) -> int: ...

    def __getitems__(self, numbers: Sequence[int]) -> Batch: ...


class Table(NamedTuple):
    """Samples [n, features], with classes [n] or, for each label, 0 or 1 [n, outputs].

    origin: their source, as text to print with every figure.
    """

    train: Samples
    test: Samples
    features: int
    outputs: int
    origin: str

    def loss(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some samples."""
        if targets.is_floating_point():
            return F.binary_cross_entropy_with_logits(scores, targets)
        return F.cross_entropy(scores, targets)

    @torch.no_grad()
    def mean_loss(self, model: torch.nn.Module, device: str = "cpu") -> float:
        """Return the mean loss of the training samples."""
        batches = in_parts(self.train, device)
        total = sum(float(self.loss(model(x), y)) * len(x) for x, y in batches)
        return total / len(self.train)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module, device: str = "cpu") -> float:
        """Return the share of test samples whose highest score is at their class or one label."""
        right = 0.0
        for x, targets in in_parts(self.test, device):
            highest = model(x).argmax(1)
            if targets.is_floating_point():
                right += float(targets.gather(1, highest[:, None]).sum())
            else:
                right += float((highest == targets).sum())
        return right / len(self.test)


def in_parts(samples: Samples, device: str) -> Iterator[Batch]:
    """Yield all samples in batches on a device."""
    for first in range(0, len(samples), _AT_ONCE):
        x, y = samples.__getitems__(range(first, min(first + _AT_ONCE, len(samples))))
        yield x.to(device), y.to(device)


class File(NamedTuple):
    """A file to read instead of synthetic samples.

    label_base: for delicious: the first label's number, 0 or 1, if the file has no header; None: it
        has one, as in the Extreme Classification Repository.
    feature_base: the first feature's number in such a file; 1 in LIBSVM's files.
    """

    path: Path
    label_base: int | None = None
    feature_base: int = 1

    def read(self, shape: Shape) -> LabelledRows:
        """Return the file's rows; raise ValueError if it belongs to another data set."""
        if shape.classes:
            return read_libsvm(shape.name, self.path)
        if self.label_base is not None:
            return read_multilabel(
                self.path,
                features=shape.features,
                feature_base=self.feature_base,
                labels=shape.labels,
                label_base=self.label_base,
            )
        found = read_xml(self.path)
        widths = found.features.width, found.labels.width
        if widths != (shape.features, shape.labels):
            raise ValueError(
                f"{self.path}: {shape.name} has {shape.features} features and {shape.labels} "
                f"labels, and the header says {widths[0]} and {widths[1]}"
            )
        return found


def open_table(name: str, seed: int, rows: int, file: File | None = None) -> Table:
    """Return a table: one of TABLES, or a data set of `models.data.load`.

    rows: number of synthetic samples that replace a published set if no file is given.
    seed: selects the fifth of the samples that is held out.
    Raises the errors of the files' readers.
    """
    if name not in TABLES:
        data = load(name, seed)
        return Table(TensorSet(data.train), TensorSet(data.test), data.features, data.classes, name)
    shape = shape_of(name)
    if file is not None:
        found = file.read(shape)
    elif shape.classes:
        found = synthesise_table(shape, rows)
    else:
        found = synthesise(shape, rows)
    order = np.random.default_rng(seed).permutation(len(found))
    tested, trained = np.split(order, [round(len(order) * TEST_SHARE)])
    train, test = (
        DenseDataset(found.take(part), multilabel=not shape.classes) for part in (trained, tested)
    )
    return Table(train, test, shape.features, shape.labels, found.origin)
