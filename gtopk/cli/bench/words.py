"""Words: what an option of a benchmark takes that may have several, with spaces between them.

With spaces, not commas, as a word may hold some itself: gtopk:growth=2.0,put_back=spread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

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
