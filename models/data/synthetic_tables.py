"""Synthetic tables of covtype's, w8a's and real-sim's dimensions.

Rows are as sparse as the set's, and classes as imbalanced. A random network of 8 tanh units, the
same for training and test, decides a row's class; 2 % of the rows get the other class. A network
can learn it, a linear model only in part.

Delicious is multilabel: `synthetic_xml.synthesise` makes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from .catalogue import Shape
from .rows import LabelledRows, LabelLists, SparseRows
from .synthetic_xml import draw_lengths, draw_rows

UNITS: Final = 8
WRONG_SHARE: Final = 0.02
_REFERENCE_ROWS: Final = 4096  # rows from which the threshold of the second class is found


def synthesise_table(shape: Shape, rows: int, seed: int = 0, *, stream: int = 0) -> LabelledRows:
    """Return rows like those of covtype, w8a or real-sim; seed, stream: as `synthesise`.

    Raises ValueError for another shape.
    """
    if shape.name not in _KINDS:
        raise ValueError(f"the table must be one of {', '.join(_KINDS)}, got {shape.name!r}")
    draw, share = _KINDS[shape.name]
    random = np.random.default_rng([seed, 1 + stream])
    network = np.random.default_rng([seed, 0])
    weights = network.normal(size=(shape.features, UNITS))
    outer = network.normal(size=UNITS)
    reference = _scores(draw(shape, _REFERENCE_ROWS, network), weights, outer)
    features = draw(shape, rows, random)
    second = _scores(features, weights, outer) > np.quantile(reference, 1 - share)
    second ^= random.random(rows) < WRONG_SHARE
    labels = LabelLists(np.arange(rows + 1), second.astype(np.int32), 2)
    return LabelledRows(features, labels, f"synthetic, like {shape.name}")


def _scores(rows: SparseRows, weights: np.ndarray, outer: np.ndarray) -> np.ndarray:
    row, lengths = rows.row_of_entry(), rows.lengths()
    sums = [np.bincount(row, rows.values * w[rows.indices], minlength=len(rows)) for w in weights.T]
    inner = np.tanh(2 * np.array(sums) / lengths)
    scores: np.ndarray = outer @ inner
    return scores


def _measured(shape: Shape, rows: int, random: np.random.Generator) -> SparseRows:
    """Return ten measured columns, one of the next four and one of the others, as covtype has."""
    measured = np.broadcast_to(np.arange(10), (rows, 10))
    areas = 10 + random.integers(0, 4, (rows, 1))
    soils = 14 + random.integers(0, shape.features - 14, (rows, 1))
    indices = np.concatenate([measured, areas, soils], axis=1)
    values = np.ones(indices.shape, np.float32)
    values[:, :10] = random.random((rows, 10))
    offsets = np.arange(rows + 1) * indices.shape[1]
    return SparseRows(
        offsets, indices.astype(np.int32).reshape(-1), values.reshape(-1), shape.features
    )


def _words(shape: Shape, rows: int, random: np.random.Generator) -> SparseRows:
    """Return rows of length 1, with values in a few of many columns."""
    lengths = draw_lengths(shape, rows, random)
    none = np.zeros(lengths.sum(), bool)
    return draw_rows(shape, lengths, none, none, random)


def _marks(shape: Shape, rows: int, random: np.random.Generator) -> SparseRows:
    """Return rows with ones in a few columns."""
    words = _words(shape, rows, random)
    return SparseRows(words.offsets, words.indices, np.ones_like(words.values), words.width)


# How rows are drawn, and about the set's share of the second class.
_KINDS: Final[dict[str, tuple[Callable[[Shape, int, np.random.Generator], SparseRows], float]]] = {
    "covtype": (_measured, 0.49),
    "w8a": (_marks, 0.03),
    "real-sim": (_words, 0.31),
}
