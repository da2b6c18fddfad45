"""LIBSVM's files; they have no header, so the caller gives the counts and the first numbers.

-1 3:1 11:1             one of some classes; indices are 1-based in LIBSVM's own files
3,17 1:0.25 10:1.5      labels, comma-separated; a row without any begins with a space
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .row_cache import cached
from .rows import LabelledRows
from .text_file import TextFile
from .text_line import Layout, Numbering
from .xml import MOST_COLUMNS


def read_classes(
    path: str | Path,
    *,
    features: int,
    feature_base: int,
    classes: Sequence[float],
    cache: bool = True,
) -> LabelledRows:
    """Return a binary or multiclass file: each row has one label, its class from 0; as `read_xml`.

    features: number of features: a file's largest index may be smaller.
    feature_base: the first feature's index, 0 or 1.
    classes: the numbers that stand for class 0, 1, ...: (-1, 1), say, or (1, 2).
    Raises MalformedFile, OSError; ValueError for arguments out of range.
    """
    if len(set(classes)) != len(classes) or not classes:
        raise ValueError(f"classes must be numbers, none of them twice, got {list(classes)}")
    layout = Layout(_numbering("feature", feature_base, features), None, tuple(classes))
    return _read(Path(path), layout, cache)


def read_multilabel(
    path: str | Path,
    *,
    features: int,
    feature_base: int,
    labels: int,
    label_base: int,
    cache: bool = True,
) -> LabelledRows:
    """Return a multilabel file, as `read_classes`; label_base: the first label's number."""
    layout = Layout(
        _numbering("feature", feature_base, features), _numbering("label", label_base, labels)
    )
    return _read(Path(path), layout, cache)


def _read(path: Path, layout: Layout, cache: bool) -> LabelledRows:
    def parse() -> LabelledRows:
        return TextFile(path).rows(layout)

    return cached([path], f"libsvm {layout}", parse) if cache else parse()


def _numbering(what: str, base: int, count: int) -> Numbering:
    if base not in (0, 1):
        raise ValueError(f"{what}_base must be 0 or 1, got {base}: files count from one of them")
    if not 1 <= count <= MOST_COLUMNS:
        raise ValueError(f"{what}s must lie in 1..{MOST_COLUMNS}, got {count}")
    return Numbering(base, count)
