"""Skipped steps: those that no rank applied, as a gradient or a sum was not finite."""

from __future__ import annotations

import logging

from .logs import EVERYWHERE

_log = logging.getLogger("gtopk")


class SkippedSteps:
    """How many there were, and the end of too many in a row.

    allowed: how many in a row are no error.
    count:   all of them.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._in_a_row = 0
        self.count = 0

    def end_row(self) -> None:
        """Note a step that was applied."""
        self._in_a_row = 0

    def note(self, rank: int, step: int, where: str) -> None:
        """Warn, on every rank, of the ranks and parameters whose gradients are not finite.

        where: what these are; "" where their sum is what is not.
        Raises FloatingPointError where more steps in a row were skipped than may be.
        """
        self.count += 1
        self._in_a_row += 1
        _log.warning(
            "rank %d: step %d is skipped on every rank, residuals untouched: %s",
            rank,
            step,
            f"the gradient is not finite on {where}"
            if where
            else "the sum of finite gradients is not finite",
            extra=EVERYWHERE,
        )
        if self._in_a_row > self._allowed:
            raise FloatingPointError(
                f"rank {rank}: {self._in_a_row} steps in a row were skipped at step {step}, the "
                f"last because "
                f"{'a gradient is not finite on ' + where if where else 'a sum overflowed'}; "
                f"max_skipped_steps={self._allowed} allows as many"
            )
