"""Arguments: numbers and files that options of the command `gtopk` take; others are refused."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..runtime.launch import launched_by

T = TypeVar("T")


def as_argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return `read` with its ValueError made argparse's."""

    def value(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def whole_number(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"must be a whole number, at least 1, got {text!r}")
    return int(text)


def from_zero(text: str) -> int:
    """Return a whole number of at least 0."""
    if not text.isdecimal():
        raise ValueError(f"must be a whole number, at least 0, got {text!r}")
    return int(text)


def number_in(interval: str) -> Callable[[str], float]:
    """Return what reads a finite number of an interval, as "(0, 1]" or "[0, inf)"."""
    least, most = map(float, interval[1:-1].split(","))
    holds_least, holds_most = interval[0] == "[", interval[-1] == "]"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        above = value > least or (holds_least and value == least)
        below = value < most or (holds_most and value == most)
        if not (above and below and math.isfinite(value)):
            raise ValueError(f"must lie in {interval}, got {text!r}")
        return value

    return read


share = number_in("(0, 1]")  # of entries, such as a density
above_zero = number_in("(0, inf)")


def output_file(text: str) -> Path:
    """Return the path of a file that rank 0 can write, before hours go into what is to be in it.

    Folders on the way are made; what is in the file stays.
    """
    path, job = Path(text), launched_by()
    if job is not None and job.rank > 0:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{text} cannot be written: {error.strerror}") from None
    return path
