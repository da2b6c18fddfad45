"""Lost replicas: those that were not finite when models were exchanged, and became the others'."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from .agreement import name_ranks

_log = logging.getLogger("gtopk")


class LostReplicas:
    """How many there were, and the end of too many outer steps in a row that went without some.

    allowed: how many in a row are no error.
    count:   all of them, of all ranks.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._in_a_row = 0
        self.count = 0

    def end_row(self) -> None:
        """Note an outer step in which no replica was lost."""
        self._in_a_row = 0

    def note(self, rank: int, step: int, lost: Mapping[int, Sequence[str]], moved: bool) -> None:
        """Warn, on every rank, of replicas that are not finite.

        lost:  by rank, the parameters that are not; none: their sum is what is not.
        moved: whether the outer step has changed the model, by the replicas of the others.
        Raises FloatingPointError where that were more outer steps in a row than may be.
        """
        self.count += len(lost)
        self._in_a_row += 1
        where = "; ".join(f"rank {r}: {', '.join(map(repr, n[:3]))}" for r, n in lost.items())
        why = f"a replica is not finite on {where}" if lost else "the sum of replicas overflowed"
        _log.warning(
            "rank %d: outer step %d %s: %s",
            rank,
            step,
            f"goes on without {name_ranks(list(lost))}" if moved else "changes nothing",
            why,
        )
        if self._in_a_row > self._allowed:
            raise FloatingPointError(
                f"rank {rank}: {self._in_a_row} outer steps in a row were without "
                f"some replicas, the last, number {step}, because {why}; "
                f"max_skipped_steps={self._allowed} allows as many"
            )
