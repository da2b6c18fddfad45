"""Count consecutive skipped steps; raise when the limit is exceeded.

Skipped steps: those that no rank applied, as a gradient or a sum was not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ..runtime.logs import EVERYWHERE


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
        """Note a good one, or that a state was loaded, which those in the row do not follow."""
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


_log = logging.getLogger("gtopk")
# GradScaler begins at a scale of 65,536 = 2^16 and halves it at each step that overflows: gradients
# that are finite unscaled are so after 16.
MAX_SKIPPED_STEPS: Final = 20


class SkippedSteps(SkipCounter):
    """How many there were, and the end of too many in a row."""

    def note(self, rank: int, step: int, where: str) -> None:
        """Warn, on every rank, of the ranks and parameters whose gradients are not finite.

        where: what these are; "" where their sum is what is not.
        Raises FloatingPointError where more steps in a row were skipped than may be.
        """
        unlike = f"gradient is not finite on {where}"
        seen = f"the {unlike}" if where else "the sum of finite gradients is not finite"
        why = f"a {unlike}" if where else "a sum overflowed"
        warning = "rank %d: step %d is skipped on every rank, residuals untouched: %s"
        self.note_that(rank, step, warning, seen, why)

    def note_that(self, rank: int, step: int, warning: str, seen: str, why: str) -> None:
        """Do what `note` does in other words: `warning` with rank, step and what was seen."""
        self.count += 1
        _log.warning(warning, rank, step, seen, extra=EVERYWHERE)
        self._lengthen(
            lambda n: (
                f"rank {rank}: {n} steps in a row were skipped at step {step}, the last because "
                f"{why}"
            )
        )
