"""Reads the files of the Extreme Classification Repository, for multi-label classification.

The old format, which SLIDE's copies have too, is one file, 0-based, with a header:

    rows features labels
    3,17 0:0.25 9:1.5
     0:0.25              a row without labels begins with a space

The new one is two, each with a header of its own:

    rows features        rows labels
    0:0.25 9:1.5         3:1 17:1
    0:0.25

A copy without its header is read by `libsvm.read_multilabel`, which takes its counts as arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from .malformed import MalformedFile
from .row_cache import cached
from .rows import LabelledRows, LabelLists, SparseRows
from .text_file import TextFile
from .text_line import Layout, Numbering

MOST_COLUMNS: Final = 2**31 - 1
_COUNTS: Final = re.compile(rb"\s*[0-9]{1,18}(?:[ \t]+[0-9]{1,18})*\s*")


def read_xml(path: str | Path, *, cache: bool = True) -> LabelledRows:
    """Return a file of the old format; plain, gzip or bzip2.

    cache: keep the rows in a cache beside the file (see `row_cache`), and read them from there.
    Raises MalformedFile, a ValueError that names file, line and reason; OSError.
    """
    path = Path(path)
    return cached([path], "xml", lambda: _read_one(path)) if cache else _read_one(path)


def read_xml_pair(features: str | Path, labels: str | Path, *, cache: bool = True) -> LabelledRows:
    """Return the two files of the new format, as `read_xml`; a label's weight must be 1."""
    paths = Path(features), Path(labels)
    return cached(paths, "xml pair", lambda: _read_two(*paths)) if cache else _read_two(*paths)


def read_split(path: str | Path, rows: int, column: int = 0) -> np.ndarray:
    """Return the numbers of the rows, from 0, in a split file: `LabelledRows.take` them.

    The repository's small sets are one file, beside files for training and test in which each
    column is a split: on every line a row's number, from 1, for each split.
    Raises MalformedFile, OSError; ValueError for a missing column.
    """
    path = Path(path)
    numbers, columns = [], None
    for line, text in enumerate(path.read_bytes().splitlines(), start=1):
        fields = text.split()
        columns = len(fields) if columns is None else columns
        if len(fields) != columns or not _COUNTS.fullmatch(text):
            raise MalformedFile(
                path, line, f"must be {max(columns, 1)} numbers of rows, one for each split"
            )
        if not 0 <= column < columns:
            raise ValueError(f"{path}: column must lie in 0..{columns - 1}, got {column}")
        number = int(fields[column])
        if not 1 <= number <= rows:
            raise MalformedFile(path, line, f"row {number} must lie in 1..{rows}")
        numbers.append(number - 1)
    chosen = np.array(numbers, np.int64)
    if len(np.unique(chosen)) < len(chosen):
        twice = int(np.flatnonzero(np.bincount(chosen) > 1)[0])
        raise MalformedFile(path, None, f"lists row {twice + 1} twice in column {column}")
    return chosen


def _read_one(path: Path) -> LabelledRows:
    file = TextFile(path)
    rows, features, labels = _header(file, ("rows", "features", "labels"))
    return file.rows(Layout(Numbering(0, features), Numbering(0, labels)), rows)


def _read_two(feature_path: Path, label_path: Path) -> LabelledRows:
    features = _read_matrix(feature_path, "features")
    labels = _read_matrix(label_path, "labels")
    if len(labels) != len(features):
        raise MalformedFile(
            label_path, None, f"has {len(labels)} rows where {feature_path} has {len(features)}"
        )
    if (weighted := np.flatnonzero(labels.values != 1)).size:
        row = int(labels.row_of_entry()[weighted[0]])
        raise MalformedFile(
            label_path,
            row + 2,
            f"label {labels.indices[weighted[0]]} has weight {labels.values[weighted[0]]:g}; a "
            "label is there, with 1, or is not",
        )
    lists = LabelLists(labels.offsets, labels.indices, labels.width)
    return LabelledRows(features, lists, feature_path.name)


def _read_matrix(path: Path, columns: str) -> SparseRows:
    file = TextFile(path)
    rows, width = _header(file, ("rows", columns))
    return file.rows(Layout(Numbering(0, width)), rows).features


def _header(file: TextFile, names: Sequence[str]) -> list[int]:
    """Return the counts on the first line.

    Raises MalformedFile for anything else: without a header the first index is unknown.
    """
    line = file.first_line()
    counts = [int(count) for count in line.split()] if _COUNTS.fullmatch(line) else []
    if len(counts) != len(names):
        said = line[:40].decode("ascii", "backslashreplace")
        raise file.refuse(f"must be a header, '{' '.join(names)}', got {said!r}")
    for name, count in zip(names[1:], counts[1:], strict=True):
        if not 1 <= count <= MOST_COLUMNS:
            raise file.refuse(f"the number of {name} must lie in 1..{MOST_COLUMNS}, got {count}")
    return counts
