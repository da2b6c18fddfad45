"""Read files of the Extreme Classification Repository, for multi-label classification.

One file, 0-based, with a header; SLIDE's copies have this format, too:

    rows features labels
    3,17 0:0.25 9:1.5
     0:0.25              a row without labels begins with a space

`libsvm.read_multilabel` reads a copy without header, and takes the counts as arguments.
"""

from __future__ import annotations

from pathlib import Path

from .libsvm import Layout, read_rows
from .malformed import MalformedFile
from .rows import LabelledRows


def read_xml(path: str | Path) -> LabelledRows:
    """Return the rows of a file, plain, gzip (.gz) or bzip2 (.bz2).

    Raises MalformedFile, a ValueError that names the file and the reason; OSError; ImportError
    without scikit-learn.
    """
    return read_rows(Path(path), _layout)


def _layout(path: Path, header: bytes) -> Layout:
    """Return the layout that the first line says; raise MalformedFile if it is not a header."""
    fields = header.split()
    if len(fields) != 3 or not all(field.isdigit() for field in fields):
        got = header[:40].decode("ascii", "backslashreplace").strip()
        reason = f"must be a header, 'rows features labels', got {got!r}"
        raise MalformedFile(path, 1, reason)
    rows, features, labels = map(int, fields)
    return Layout(features, 0, labels, 0, rows=rows)
