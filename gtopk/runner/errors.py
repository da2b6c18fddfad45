"""The one error that a failure on ranks becomes."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank failed: which, with what, and the traceback it had there.

    rank:      the rank that failed first.
    traceback: its traceback, as Python prints it; "" where the process ended without one.
    """

    def __init__(self, rank: int, text: str, traceback: str = "") -> None:
        super().__init__(f"{text}\n\n{traceback}".rstrip())
        self.rank = rank
        self.traceback = traceback
