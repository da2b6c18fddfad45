"""Cases to measure, the picks that ranks exchange in them, and the records that are written.

Picks are synthetic and seeded, so that every rank can compute those of all others:

    uniform     positions all over the vector, other ones on each rank: hardly any two ranks agree
    clustered   half of a rank's positions come from runs of 64 that all ranks share, as those of
                the hot rows of a layer do: neighbours in position, and large on many ranks at once

Values are above a threshold, most of them near it, as those of a selection are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np

from collectives.vector import Array, SparseVector, index_dtype

from ....runtime.machine import Machine
from ..harness import PerRank, Spread


class Case(NamedTuple):
    """One number of ranks, one length, one density, one distribution of the picks."""

    ranks: int
    length: int
    density: float
    distribution: str

    @property
    def k(self) -> int:
        """Return the most entries that a rank selects."""
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


RUN: Final = 64
# From here on a vector's positions are not shuffled to draw some of them: 8 bytes for each.
_LONG: Final = 1 << 26
Random = np.random.Generator


def picks(distribution: str, length: int, k: int, rank: int, seed: int) -> SparseVector:
    """Return a rank's picks: at most k entries of a vector of float32."""
    shared = np.random.default_rng([seed, length, k])
    # rank + 1: a trailing 0 in a seed changes nothing, and rank 0 would draw what is shared.
    own = np.random.default_rng([seed, length, k, rank + 1])
    indices = np.sort(DISTRIBUTIONS[distribution](length, k, shared, own))
    values = (1.0 + own.standard_exponential(indices.size)) * own.choice([-1.0, 1.0], indices.size)
    return SparseVector(indices.astype(index_dtype(length)), values.astype(np.float32), length)


def uniform(length: int, k: int, shared: Random, own: Random) -> Array:
    if length < _LONG or 4 * k > length:
        # Unshuffled, as the caller sorts them.
        return own.choice(length, k, replace=False, shuffle=False)
    drawn = np.unique(own.integers(length, size=k))
    # Some fall together: at most a quarter of them, as k is no more than that of the vector.
    while drawn.size < k:
        drawn = np.union1d(drawn, own.integers(length, size=k - drawn.size))
    return drawn


def clustered(length: int, k: int, shared: Random, own: Random) -> Array:
    runs = min(max(1, k // RUN), length // RUN)
    starts = RUN * shared.choice(max(1, length // RUN), runs, replace=False)
    hot = (starts[:, None] + np.arange(RUN)).reshape(-1)
    mine = own.choice(hot, min(k // 2, hot.size), replace=False)
    return np.union1d(mine, uniform(length, k - mine.size, shared, own))


DISTRIBUTIONS: Final[dict[str, Callable[[int, int, Random, Random], Array]]] = {
    "uniform": uniform,
    "clustered": clustered,
}


SCHEMA: Final = 1


class Record(TypedDict):
    """One contender in one case.

    modelled_link: seconds of latency, seconds per byte, and burst bytes, as these ranks measured or
                   were given them.
    modelled_wire_seconds: latency and bandwidth alone; None where there is no model.
    modelled_code_seconds: encode, decode, merge; where all ranks share cores, as many times longer
                           as there are ranks to a core, with the work on the others' messages.
    cpu_seconds: of a rank's process.
    measured_over_modelled: the median over modelled_wire_seconds.
    measured_over_wire_and_code: the median over both.
    interface_bytes: what the network interface says it sent, headers, acknowledgements and barriers
                     included; None where no interface was named.
    """

    contender: str
    label: str
    ours: bool
    reference: bool  # others' times are divided by its: gtopk, as the model would send it
    selective: bool  # looks at the picks only; else its time holds for every density
    algorithm: str | None
    options: dict[str, Any]
    format: str | None
    ranks: int
    length: int
    density: float
    k: int
    distribution: str
    rounds: int
    seconds: Spread  # of the slowest rank
    seconds_by_round: list[float]
    cpu_seconds: PerRank
    sent_bytes: PerRank
    sent_messages: PerRank
    counted: bool  # message by message; else reckoned
    interface_bytes: PerRank | None
    updated: int  # coordinates that the update holds
    modelled_link: list[float]
    modelled_wire_seconds: float | None
    modelled_code_seconds: float | None
    measured_over_modelled: float | None
    measured_over_wire_and_code: float | None


class Results(TypedDict):
    """The whole file; run: the options, the link that the model assumes, and who took part."""

    schema: int
    benchmark: str
    machine: Machine
    run: dict[str, Any]
    records: list[Record]
