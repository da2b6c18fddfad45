"""Track, merge by merge, which of this rank's picks survive and what returns to its residual.

"owners"   a pick whose index a merge dropped is dead: it returns whole to the rank that picked
           it, also when another branch brings the index back. What its value lost to rounding
           on the way is part of the pick: it is struck off.
"spread"   what a merge of lists dropped is divided evenly among the ranks that hold the merged
           list (a power of two: the division is exact). Only the merge with a folded rank's
           list, which one rank alone holds, goes by owners.
"""

from __future__ import annotations

from ..kernels import contains
from ..vector import Array, SparseVector
from .outcome import Outcome, among, put_together

PUT_BACK = ("owners", "spread")


class Conservation:
    """One rank's picks, what is alive of them, and what else is its to put back."""

    def __init__(self, picks: SparseVector, put_back: str) -> None:
        self.picks = picks
        self.alive = picks.indices == picks.indices  # all of them
        self._spread = put_back == "spread"
        self._errors = picks.at(slice(0))
        self._shares: list[SparseVector] = []

    def note_rounding(self, error: SparseVector) -> None:
        """Add errors that are this rank's to put back."""
        self._errors = put_together([self._errors, error])

    def note_merge(self, merged: SparseVector, dropped: SparseVector, holders: int) -> None:
        """Take in a merge whose result `holders` ranks hold."""
        if self._spread and holders > 1:
            self._shares.append(dropped._replace(values=dropped.values / holders))
        else:
            self.alive = self.alive & contains(merged.indices, self.picks.indices)
            self._errors = among(self._errors, merged)

    def note_fate(self, alive: Array) -> None:
        """Take in what another rank found out for this one: which picks are alive, bool [picks]."""
        self.alive = self.alive & alive
        self._errors = among(self._errors, self.picks.where(self.alive))

    def close(self, update: SparseVector) -> Outcome:
        """Return the outcome."""
        extra = put_together([self._errors, *self._shares])
        return Outcome(update, self.picks.where(~self.alive), extra)
