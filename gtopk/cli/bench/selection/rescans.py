"""How often a search reads the residual twice: over many steps, and over what changes in them.

A search is guided by a threshold from the step before. Where that hid some of the k largest, or let
far too many through, the residual is read again: right all the same, but late. Steps go on as in
training, with error feedback, and at shares of them something changes:

    0 %           5 %      10 %        40 %          55 %          70 %        80 %
    k * 64   k * 16   k * 4   k        rate / 10     k * 4         k           rate / 10
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from collectives import SparseVector
from collectives.kernels import reference, why_not_compiled

from .gradients import Array, Source
from .measure import Answer

# At which share of the steps: what the density is multiplied by from then on.
DENSITIES: Final = {0.0: 64.0, 0.025: 16.0, 0.05: 4.0, 0.1: 1.0, 0.55: 4.0, 0.7: 1.0}
MOST_DENSE: Final = 0.25
# And at which the learning rate is divided by 10.
DROPS: Final = (0.4, 0.8)

# (residual, gradient, k, threshold) -> picks, the next threshold, how often the residual was read.
Search = Callable[[Array, Array, int, float], tuple[SparseVector, float, int]]


class Rescans(NamedTuple):
    """One method over all steps.

    rescans:    the steps after the first that read the residual more than once.
    at_changes: those of them in which the density or the learning rate had just changed.
    exact:      whether every step selected k entries, and no other was larger.
    """

    method: str
    data: str
    n: int
    density: float
    steps: int
    density_changes: int
    rate_drops: int
    rescans: int
    at_changes: int
    exact: bool

    @property
    def share(self) -> float:
        """Return the share of the steps that read the residual again."""
        return self.rescans / self.steps


class _Twin:
    """One method with its own residual, and what it counted."""

    def __init__(self, search: Search, length: int) -> None:
        self.search = search
        self.residual = np.zeros(length, np.float32)
        self.threshold = 0.0
        self.rescans = self.at_changes = 0
        self.exact = True


def searches() -> dict[str, Search]:
    """Return the ways to search that are here, by the names of their methods."""
    found: dict[str, Search] = {"gtopk-reference": reference.search}
    if not why_not_compiled():
        found["gtopk-compiled"] = _compiled
    return found


def _compiled(
    residual: Array, gradient: Array, k: int, threshold: float
) -> tuple[SparseVector, float, int]:
    from collectives.kernels.host import selection

    picked, report = selection.search(residual, gradient, k, threshold)
    return picked, report.next_threshold, report.scans


def count_rescans(
    source: Source,
    density: float,
    steps: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Rescans]:
    """Return how each way to search fares on the same gradients."""
    twins = {name: _Twin(search, source.length) for name, search in searches().items()}
    densities = {int(share * steps): factor for share, factor in DENSITIES.items()}
    drops = {int(share * steps) for share in DROPS}
    k = 0
    for step in range(steps):
        changed = step in densities or step in drops
        if step in densities:
            k = max(1, round(source.length * min(MOST_DENSE, density * densities[step])))
        if step in drops:
            source.slow_down(0.1)
        if step % 10 == 0:
            progress(f"{source.label}: step {step} of {steps}")
        gradient = source.next_gradient()
        for twin in twins.values():
            answer = Answer(twin.residual + gradient, k)
            picked, twin.threshold, scans = twin.search(twin.residual, gradient, k, twin.threshold)
            twin.exact &= answer.is_given_by(picked)
            if step and scans > 1:
                twin.rescans += 1
                twin.at_changes += changed
            reference.clear_at(twin.residual, picked.indices)
        source.apply(picked)
    return [
        Rescans(
            method=name,
            data=source.label,
            n=source.length,
            density=density,
            steps=steps,
            density_changes=len(densities) - 1,
            rate_drops=len(drops),
            rescans=twin.rescans,
            at_changes=twin.at_changes,
            exact=twin.exact,
        )
        for name, twin in twins.items()
    ]
