"""Cases: what is measured, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Case(NamedTuple):
    """One number of ranks, one length, one density, one distribution of the picks."""

    ranks: int
    length: int
    density: float
    distribution: str

    @property
    def k(self) -> int:
        """Return how many entries a rank selects at the most."""
        return max(1, round(self.length * self.density))

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, n = {self.length:,}, density {self.density:g} (k = {self.k:,}), "
            f"{self.distribution} picks"
        )


def cases(
    ranks: Sequence[int],
    lengths: Sequence[int],
    densities: Sequence[float],
    distributions: Sequence[str],
) -> Iterator[tuple[Case, bool]]:
    """Yield each case, and whether it is the first of its ranks and length.

    Dense contenders run in the first one only: they look at every coordinate in any case.
    """
    for size, length in itertools.product(ranks, lengths):
        for place, (density, distribution) in enumerate(
            itertools.product(densities, distributions)
        ):
            yield Case(size, length, density, distribution), place == 0
