"""LIBSVM's files. They have no header, so the caller passes the counts and the first numbers.

-1 3:1 11:1             one of some classes; indices are 1-based in LIBSVM's own files
3,17 1:0.25 10:1.5      labels, comma-separated; a row without any begins with a space

scikit-learn parses them. Values that it accepts but that are unfit for training are refused here.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .malformed import MalformedFile
from .rows import LabelledRows, LabelLists, SparseRows

MOST_COLUMNS: Final = 2**31 - 1
_OPENERS: Final[dict[str, Callable[..., Any]]] = {".gz": gzip.open, ".bz2": bz2.open}


class Layout(NamedTuple):
    """The meaning of a file's indices and labels.

    features, labels: how many there are; feature_base, label_base: the first one's number, 0 or 1.
    classes: the numbers that stand for class 0, 1, ...; (): each row has a list of labels.
    rows: the number there must be; None: any, at least 1.
    """

    features: int
    feature_base: int
    labels: int
    label_base: int = 0
    classes: tuple[float, ...] = ()
    rows: int | None = None


def read_classes(
    path: str | Path, *, features: int, feature_base: int, classes: Sequence[float]
) -> LabelledRows:
    """Return a binary or multiclass file: each row has one label, its class from 0.

    features: number of features; the largest index in the file may be smaller.
    feature_base: the first feature's index, 0 or 1.
    classes: the numbers that stand for class 0, 1, ..., such as (-1, 1) or (1, 2).
    Raises MalformedFile, a ValueError that names the file and the reason; OSError; ValueError for
    arguments out of range; ImportError without scikit-learn.
    """
    if len(set(classes)) != len(classes) or not classes:
        raise ValueError(f"classes must be numbers, none of them twice, got {list(classes)}")
    layout = Layout(features, feature_base, len(classes), classes=tuple(classes))
    return read_rows(Path(path), lambda *_: layout, has_header=False)


def read_multilabel(
    path: str | Path, *, features: int, feature_base: int, labels: int, label_base: int
) -> LabelledRows:
    """Return a multilabel file, as `read_classes`; label_base: the first label's number."""
    layout = Layout(features, feature_base, labels, label_base)
    return read_rows(Path(path), lambda *_: layout, has_header=False)


def read_rows(
    path: Path, layout_of: Callable[[Path, bytes], Layout], *, has_header: bool = True
) -> LabelledRows:
    """Return a file's rows.

    layout_of: returns the layout, given the path and the first line (b"" without a header).
    """
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        raise ImportError(f"'{path}' needs scikit-learn: pip install scikit-learn") from error
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            layout = _checked(layout_of(path, file.readline() if has_header else b""))
            matrix, lists = load_svmlight_file(
                file,
                n_features=layout.features,
                dtype=np.float32,
                multilabel=not layout.classes,
                zero_based=not layout.feature_base,
            )
        features = SparseRows(
            matrix.indptr.astype(np.int64),
            matrix.indices.astype(np.int32),
            matrix.data,
            layout.features,
        )
        if not len(features):
            raise ValueError("has no rows")
        if layout.rows not in (None, len(features)):
            raise ValueError(
                f"holds {len(features)} rows with labels or features, its header says {layout.rows}"
            )
        if not np.isfinite(features.values).all():
            raise ValueError("holds a value that is not finite in float32")
        labels = _classes(lists, layout) if layout.classes else _labels(lists, layout)
    except MalformedFile:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise MalformedFile(path, None, str(error)) from error  # a damaged gzip or bzip2 file
    except (ValueError, OverflowError, EOFError, zlib.error) as error:
        raise MalformedFile(path, None, str(error)) from error
    return LabelledRows(features, labels, path.name)


def _checked(layout: Layout) -> Layout:
    for what in ("feature", "label"):
        count, base = getattr(layout, f"{what}s"), getattr(layout, f"{what}_base")
        if base not in (0, 1):
            raise ValueError(f"{what}_base must be 0 or 1, got {base}")
        if not 1 <= count <= MOST_COLUMNS:
            raise ValueError(f"the number of {what}s must lie in 1..{MOST_COLUMNS}, got {count}")
    return layout


def _classes(numbers: np.ndarray, layout: Layout) -> LabelLists:
    found = np.full(len(numbers), -1, np.int32)
    for number, value in enumerate(layout.classes):
        found[numbers == value] = number
    if (unknown := np.flatnonzero(found < 0)).size:
        known = ", ".join(f"{value:g}" for value in layout.classes)
        row = unknown[0]
        raise ValueError(f"row {row + 1} has label {numbers[row]:g}, which is none of {known}")
    return LabelLists(np.arange(len(found) + 1), found, layout.labels)


def _labels(lists: Sequence[tuple[float, ...]], layout: Layout) -> LabelLists:
    counts = [len(each) for each in lists]
    numbers = np.fromiter(itertools.chain.from_iterable(lists), np.float64, sum(counts))
    labels, rows = numbers - layout.label_base, np.repeat(np.arange(len(lists)), counts)
    wrong = np.flatnonzero(
        (labels != np.floor(labels)) | ~((labels >= 0) & (labels < layout.labels))
    )
    if wrong.size:
        last = layout.labels - 1 + layout.label_base
        raise ValueError(
            f"row {rows[wrong[0]] + 1} has label {numbers[wrong[0]]:g}, which is not a whole "
            f"number in {layout.label_base}..{last}"
        )
    if len(np.unique(rows * layout.labels + labels.astype(np.int64))) < len(labels):
        raise ValueError("a row has a label twice")
    return LabelLists(
        np.concatenate([[0], np.cumsum(counts)]), labels.astype(np.int32), layout.labels
    )
