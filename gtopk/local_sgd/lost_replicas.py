"""Lost replicas: those that were not finite when models were exchanged, and became the others'."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ..engine.agreement import name_ranks
from ..replicas.replicas import BUFFERS_STAY
from ..step.skip_counter import SkipCounter

_log = logging.getLogger("gtopk")


class LostReplicas(SkipCounter):
    """How many there were, of all ranks; a row is of outer steps that went without some."""

    def note(self, rank: int, step: int, lost: Mapping[int, Sequence[str]], moved: bool) -> None:
        """Warn, on every rank, of replicas that are not finite.

        lost:  by rank, the parameters that are not; none: their sum is what is not.
        moved: whether the outer step has changed the model, by the replicas of the others.
        Raises FloatingPointError where that were more outer steps in a row than may be.
        """
        self.count += len(lost)
        where = "; ".join(f"rank {r}: {', '.join(map(repr, n[:3]))}" for r, n in lost.items())
        why = f"a replica is not finite on {where}" if lost else "the sum of replicas overflowed"
        _log.warning(
            "rank %d: outer step %d %s: %s",
            rank,
            step,
            f"goes on without {name_ranks(list(lost))}" if moved else "changes nothing",
            f"{why}; {BUFFERS_STAY}" if moved else why,
        )
        self._lengthen(
            lambda n: (
                f"rank {rank}: {n} outer steps in a row were without some replicas, the last, "
                f"number {step}, because {why}"
            )
        )
