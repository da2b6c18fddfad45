"""Progress: what is being measured, over the same line of a terminal; elsewhere nothing is told."""

from __future__ import annotations

import sys


def tell(text: str = "") -> None:
    """Show a text in place of the last one; none clears the line, for what is printed next."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def silent(text: str = "") -> None:
    """Tell nothing: another rank does."""
