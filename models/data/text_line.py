"""Parses one line of a file of sparse rows; finds the reason where it is malformed.

    3,17 0:0.25 9:1.5       labels 3 and 17; 0.25 in column 0, 1.5 in column 9
     0:0.25                 no labels: the line begins with a space
    -1 1:0.25               a class
    0:0.25                  neither, where another file holds the labels

This is the reference for `text_block`, which parses a thousand lines at once.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np

MOST_DIGITS: Final = 24  # of an index or a label, leading zeros among them
NUMBER: Final = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE: Final = re.compile(rb"[0-9]+")
_SPACE: Final = re.compile(rb"[ \t]")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f]")
_NOT_FINITE: Final = (b"nan", b"inf", b"infinity")
_MOST_SHOWN: Final = 40


class Numbering(NamedTuple):
    """The numbering of features or labels: base .. base + number - 1 in the file, memory from 0."""

    base: int
    number: int


class Layout(NamedTuple):
    """The layout of lines, which begin with a list of labels, a class, or the first entry.

    classes: the numbers that stand for class 0, 1, ...
    """

    features: Numbering
    labels: Numbering | None = None
    classes: tuple[float, ...] = ()


class Line(NamedTuple):
    """A row, with features and labels numbered from 0."""

    labels: list[int]
    indices: list[int]
    values: list[float]


def parse_line(line: bytes, layout: Layout) -> Line:
    """Return the row in a line, which is given without its end.

    Raises ValueError with the reason for a malformed line.
    """
    if control := _CONTROL.search(line):
        raise ValueError(f"byte 0x{control.group()[0]:02x} is part of no number")
    first, *fields = _SPACE.split(line)
    labels: list[int] = []
    if layout.labels is not None:
        labels = _label_list(first, bool(fields), layout.labels)
    elif layout.classes:
        labels = [_class_number(first, layout.classes)]
    else:
        fields = [first, *fields]
    indices: list[int] = []
    values: list[float] = []
    for field in filter(None, fields):
        index, colon, value = field.partition(b":")
        if not colon:
            raise ValueError(f"{_shown(field)} must be a pair index:value")
        indices.append(_numbered("feature", index, layout.features))
        values.append(_finite(value, f"of feature {index.decode()}"))
        if len(indices) > 1 and indices[-1] <= indices[-2]:
            what = "comes twice" if indices[-1] == indices[-2] else "comes too late"
            raise ValueError(f"feature {index.decode()} {what}: indices must ascend in a row")
    return Line(labels, indices, values)


def parse_value(text: bytes) -> float | None:
    """Return a number as float64; None where the text is not one, or too large for float32."""
    if not NUMBER.fullmatch(text):
        return None
    value = float(text)
    with np.errstate(over="ignore"):
        return value if np.isfinite(np.float32(value)) else None


def _label_list(field: bytes, has_more: bool, numbering: Numbering) -> list[int]:
    if not field:
        if not has_more:
            raise ValueError("the line is empty; a row without labels begins with a space")
        return []
    if b":" in field:
        raise ValueError(
            f"the line begins with the entry {_shown(field)}; a row without labels begins with a "
            "space"
        )
    labels = [_numbered("label", text, numbering) for text in field.split(b",")]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"label {twice + numbering.base} comes twice")
    return labels


def _class_number(field: bytes, classes: tuple[float, ...]) -> int:
    if not field:
        raise ValueError("the line must begin with its label")
    value = parse_value(field)
    if value not in classes:
        allowed = ", ".join(f"{value:g}" for value in classes)
        raise ValueError(f"label {_shown(field)} is none of {allowed}")
    return classes.index(value)


def _numbered(what: str, text: bytes, numbering: Numbering) -> int:
    base, count = numbering
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{what} {_shown(text)} must be a whole number in digits")
    if len(text) > MOST_DIGITS or not base <= int(text) < base + count:
        raise ValueError(
            f"{what} {_words(text)} must lie in {base}..{base + count - 1}: there are "
            f"{count}, counted from {base}"
        )
    return int(text) - base


def _finite(text: bytes, where: str) -> float:
    value = parse_value(text)
    if value is not None:
        return value
    if text.lower().lstrip(b"+-") in _NOT_FINITE or NUMBER.fullmatch(text):
        raise ValueError(f"value {_shown(text)} {where} is not finite in float32")
    raise ValueError(f"value {_shown(text)} {where} is no number")


def _shown(text: bytes) -> str:
    return f"'{_words(text)}'"


def _words(text: bytes) -> str:
    words = text.decode("ascii", "backslashreplace")
    return words if len(words) <= _MOST_SHOWN else words[:_MOST_SHOWN] + "..."
