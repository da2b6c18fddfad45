"""Count consecutive skipped steps; raise when the limit is exceeded.

A step is skipped, on all ranks, because a gradient or a sum was not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ..runtime.logs import EVERYWHERE


class SkipCounter:
    """Counts steps that non-finite numbers of a rank spoilt. Derived classes define `note`.

    allowed: how many in a row are no error.
    count:   counted by the `note` of the derived class.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._in_a_row = 0
        self.count = 0

    def end_row(self) -> None:
        """Begin a new row: a step was good, or a state was loaded."""
        self._in_a_row = 0

    def _lengthen(self, said: Callable[[int], str]) -> None:
        """Add a spoilt step to the row.

        said: makes the error's message of the row's length.
        Raises FloatingPointError with it where the row is longer than allowed.
        """
        self._in_a_row += 1
        if self._in_a_row > self.allowed:
            raise FloatingPointError(
                f"{said(self._in_a_row)}; max_skipped_steps={self.allowed} allows as many"
            )


_log = logging.getLogger("gtopk")
# GradScaler begins at a scale of 65,536 = 2^16 and halves it at each step that overflows: after 16
# of them the scale is 1, and gradients that are finite without a scale do not overflow any more.
MAX_SKIPPED_STEPS: Final = 20


class SkippedSteps(SkipCounter):
    """Counts skipped steps; raises when too many follow each other."""

    def note(self, rank: int, step: int, where: str) -> None:
        """Count a skipped step, and warn, on every rank, of the gradients that are not finite.

        where: ranks and parameters that have them; "": only the sum is not finite.
        Raises FloatingPointError where more steps in a row were skipped than allowed.
        """
        unlike = f"gradient is not finite on {where}"
        seen = f"the {unlike}" if where else "the sum of finite gradients is not finite"
        why = f"a {unlike}" if where else "a sum overflowed"
        warning = "rank %d: step %d is skipped on every rank, residuals untouched: %s"
        self.note_that(rank, step, warning, seen, why)

    def note_that(self, rank: int, step: int, warning: str, seen: str, why: str) -> None:
        """Count a skipped step as `note` does, with other words.

        warning: a format for rank, step and `seen`. why: ends the error's message.
        """
        self.count += 1
        _log.warning(warning, rank, step, seen, extra=EVERYWHERE)
        self._lengthen(
            lambda n: (
                f"rank {rank}: {n} steps in a row were skipped at step {step}, the last because "
                f"{why}"
            )
        )
