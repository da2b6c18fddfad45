"""Tables: what fully connected networks are trained on, as dense tensors, by the set's name."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from models.data import load
from models.data.catalogue import SHAPES, read_libsvm, shape_of
from models.data.classification import TEST_SHARE
from models.data.rows import LabelledRows
from models.data.synthetic_tables import synthesise_table
from models.data.synthetic_xml import synthesise

TABLES = ("covtype", "w8a", "real-sim", "delicious")  # those of Ma and Rusu 2020


class Table(NamedTuple):
    """Samples [n, features] and their classes [n], or 0 and 1 for all labels [n, outputs].

    origin: where they are from, in words that belong beside every figure.
    """

    train: TensorDataset
    test: TensorDataset
    features: int
    outputs: int
    origin: str

    def loss(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some samples."""
        if targets.is_floating_point():
            return F.binary_cross_entropy_with_logits(scores, targets)
        return F.cross_entropy(scores, targets)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> float:
        """Return the share of test samples whose highest score is of their class, or a label."""
        x, targets = self.test[:]
        highest = model(x).argmax(1)
        if targets.is_floating_point():
            return float(targets[torch.arange(len(x)), highest].mean())
        return float((highest == targets).float().mean())


def open_table(name: str, seed: int, rows: int, file: Path | None = None) -> Table:
    """Return a table: one of TABLES, or what `models.data.load` knows.

    rows: of the synthetic samples in place of a published set, where no file of it is given.
    seed: which fifth of the samples is held out.
    """
    if name not in TABLES:
        data = load(name, seed)
        return Table(data.train, data.test, data.features, data.classes, name)
    shape = shape_of(name)
    if file is not None:
        found = read_libsvm(name, file)
    elif shape.classes:
        found = synthesise_table(shape, rows)
    else:
        found = synthesise(shape, rows)
    x = torch.from_numpy(found.features.to_dense())
    y = targets_of(found, multilabel=not shape.classes)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))
    tested, trained = order.tensor_split([round(len(x) * TEST_SHARE)])
    return Table(
        TensorDataset(x[trained], y[trained]),
        TensorDataset(x[tested], y[tested]),
        SHAPES[name].features,
        SHAPES[name].labels,
        found.origin,
    )


def targets_of(rows: LabelledRows, *, multilabel: bool) -> torch.Tensor:
    """Return each row's class, int64 [n], or 0 and 1 for all labels, float32 [n, labels]."""
    labels = torch.from_numpy(rows.labels.indices.astype(np.int64))
    if not multilabel:
        return labels
    targets = torch.zeros(len(rows), rows.labels.width)
    targets[torch.from_numpy(rows.labels.row_of_entry()), labels] = 1
    return targets
