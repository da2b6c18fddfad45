"""Skipped steps: those that no rank applied, as a gradient or a sum was not finite."""

from __future__ import annotations

import logging
from typing import Final

from ..runtime.logs import EVERYWHERE
from .skip_counter import SkipCounter

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
