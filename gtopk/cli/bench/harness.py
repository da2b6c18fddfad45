"""Harness: what all benchmarks share: options of several words, progress, and spreads over rounds.

Words of an option have spaces between them, not commas, as a word may hold some itself:
gtopk:growth=2.0,put_back=spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TypedDict, TypeVar

T = TypeVar("T")


def add_words(
    described: argparse.ArgumentParser,
    option: str,
    read: Callable[[str], T],
    default: Sequence[T] | None = None,
    *,
    may_be_none: bool = False,
    metavar: str = "NAME",
    help: str | None = None,
) -> None:
    """Let a grammar have an option of one word or more, each as `read` returns it.

    read:        raises ValueError for a word that it does not know.
    may_be_none: the option may stand without a word, for none at all.
    """

    def word(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            apart = f"; give several with spaces: {text.replace(',', ' ')}" if "," in text else ""
            raise argparse.ArgumentTypeError(f"{error}{apart}") from None

    many = "*" if may_be_none else "+"
    described.add_argument(
        option, type=word, nargs=many, default=default, metavar=metavar, help=help
    )


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """Return what reads one of these words."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"must be one of {', '.join(known)}; got {text!r}")
        return text

    return read


def tell(text: str = "") -> None:
    """Show a text in place of the last one; none clears the line, for what is printed next."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def silent(text: str = "") -> None:
    """Tell nothing: another rank does."""


class Spread(TypedDict):
    """Of one number over the rounds."""

    min: float
    lower_quartile: float
    median: float
    upper_quartile: float
    max: float


class PerRank(TypedDict):
    """Of one number over the ranks, per round."""

    mean: float
    max: float


def spread(seconds: Sequence[float]) -> Spread:
    """Return the spread of a contender's rounds."""
    if len(seconds) == 1:
        quartiles = [seconds[0]] * 3
    else:
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(
        min=min(seconds),
        lower_quartile=quartiles[0],
        median=quartiles[1],
        upper_quartile=quartiles[2],
        max=max(seconds),
    )


def per_rank(numbers: Sequence[float]) -> PerRank:
    """Return the spread over the ranks."""
    return PerRank(mean=statistics.fmean(numbers), max=max(numbers))
