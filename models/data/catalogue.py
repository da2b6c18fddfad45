"""The published data sets by name: their shapes, and what their files do not say.

Sizes are the Extreme Classification Repository's and LIBSVM's; averages are rounded. Synthetic data
uses these shapes, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .libsvm import read_classes
from .rows import LabelledRows


@dataclass(frozen=True)
class Shape:
    """The size of a data set.

    classes: the numbers that stand for class 0, 1, ... in LIBSVM's file; () for a multilabel set.
    entries_per_row, labels_per_row: on average.
    """

    name: str
    features: int
    labels: int
    train_rows: int
    test_rows: int
    entries_per_row: float
    labels_per_row: float = 1.0
    classes: tuple[float, ...] = ()


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("amazon-670k", 135_909, 670_091, 490_449, 153_025, 75.68, 5.45),
        Shape("delicious-200k", 782_585, 205_443, 196_606, 100_095, 301.17, 75.54),
        Shape("delicious", 500, 983, 12_920, 3_185, 18.17, 19.03),
        # LIBSVM's are binary; covtype and real-sim have no test set of their own.
        Shape("covtype", 54, 2, 581_012, 0, 11.88, classes=(1, 2)),
        Shape("w8a", 300, 2, 49_749, 14_951, 11.65, classes=(-1, 1)),
        Shape("real-sim", 20_958, 2, 72_309, 0, 51.3, classes=(-1, 1)),
    )
}


def shape_of(name: str) -> Shape:
    """Return a data set's shape; raise ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"the data set must be one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]


def read_libsvm(name: str, path: str | Path) -> LabelledRows:
    """Return LIBSVM's file of covtype, w8a or real-sim: binary, with features from 1.

    Raises as `read_classes`, and ValueError for another set.
    """
    shape = shape_of(name)
    if not shape.classes:
        raise ValueError(
            f"{name} is multilabel, and its copies differ in the first label's number: use "
            "read_multilabel, or read_xml for a file with a header"
        )
    return read_classes(path, features=shape.features, feature_base=1, classes=shape.classes)
