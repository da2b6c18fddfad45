"""Count consecutive skipped steps; raise when the limit is exceeded."""

from __future__ import annotations

from collections.abc import Callable


class SkipCounter:
    """What steps are counted by that a rank's numbers, not being finite, have spoilt.

    allowed: how many in a row are no error.
    count:   what `note` of the derived class counts.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._in_a_row = 0
        self.count = 0

    def end_row(self) -> None:
        """Note a good one."""
        self._in_a_row = 0

    def _lengthen(self, said: Callable[[int], str]) -> None:
        """Note a spoilt one.

        said: what to say of so many in a row.
        Raises FloatingPointError that says so, where that were more than may be.
        """
        self._in_a_row += 1
        if self._in_a_row > self.allowed:
            raise FloatingPointError(
                f"{said(self._in_a_row)}; max_skipped_steps={self.allowed} allows as many"
            )
