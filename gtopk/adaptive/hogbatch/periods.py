"""Periods: what a worker does in a quarter of a second, as a step of the run's record."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...world.state import World
from ..local_training.own_steps import OwnSteps
from .board import Board, now_nanoseconds

PERIOD_NANOSECONDS: Final = 250_000_000  # batches may be far shorter


class Counts(NamedTuple):
    """What a worker's board says of it."""

    updates: int = 0
    samples: int = 0
    skipped: int = 0


class Periods:
    """Reports what a worker has done since its last report; one update at least, but at the end."""

    def __init__(self, steps: OwnSteps, board: Board, world: World) -> None:
        self._steps, self._board, self._world = steps, board, world
        self._reported, self._since = Counts(), 0

    def begin(self) -> None:
        """Begin one with an epoch."""
        self._since = now_nanoseconds()

    def poll(self) -> None:
        """End one, and begin another, where it has lasted long enough."""
        is_due = now_nanoseconds() - self._since >= PERIOD_NANOSECONDS
        if is_due and self._board["updates"] > self._reported.updates:
            self.end()

    def end(self) -> None:
        """Report what was done since the last report, and begin another period."""
        board, before = self._board, self._reported
        now = Counts(board["updates"], board["samples"], board["skipped"])
        self._reported, self._since = now, now_nanoseconds()
        self._steps.computed()
        self._steps.close(
            self._world.step - 1,
            now.samples - before.samples,
            now.updates - before.updates,
            skipped=now.skipped > before.skipped,
        )
