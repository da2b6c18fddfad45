"""The cases to measure, the picks that ranks exchange in them, and the format of the records.

Picks are synthetic and seeded, so that every rank can compute the picks of all others:

    uniform     positions all over the vector, independent on each rank: few positions coincide
    clustered   half of a rank's positions come from runs of 64 that all ranks share, like the hot
                rows of a layer: adjacent positions that are large on many ranks at once

As after a real selection, values exceed a threshold, and most are close to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np

from collectives.vector import Array, SparseVector, index_dtype

from ....runtime.machine import Machine
from ....units import counted
from ..harness import PerRank, Spread


class Case(NamedTuple):
    """One number of ranks, one length, one density, one distribution of the picks."""

    ranks: int
    length: int
    density: float
    distribution: str

    @property
    def k(self) -> int:
        """Return the maximum number of entries that a rank selects."""
        return max(1, round(self.length * self.density))

    def __str__(self) -> str:
        return (
            f"{counted(self.ranks, 'rank')}, n = {self.length:,}, density {self.density:g} "
            f"(k = {self.k:,}), {self.distribution} picks"
        )


def cases(
    ranks: Sequence[int],
    lengths: Sequence[int],
    densities: Sequence[float],
    distributions: Sequence[str],
) -> Iterator[tuple[Case, bool]]:
    """Yield each case, and whether it is the first of its ranks and length.

    Dense contenders run only in the first, as they read every coordinate at any density.
    """
    for size, length in itertools.product(ranks, lengths):
        for place, (density, distribution) in enumerate(
            itertools.product(densities, distributions)
        ):
            yield Case(size, length, density, distribution), place == 0


RUN: Final = 64
# Sampling from a vector this long without replacement would take 8 bytes per position.
_LONG: Final = 1 << 26
Random = np.random.Generator


def picks(distribution: str, length: int, k: int, rank: int, seed: int) -> SparseVector:
    """Return a rank's picks: at most k entries of a vector of float32."""
    shared = np.random.default_rng([seed, length, k])
    # rank + 1: a trailing 0 does not change a seed, so rank 0 would repeat the shared draws.
    own = np.random.default_rng([seed, length, k, rank + 1])
    indices = np.sort(DISTRIBUTIONS[distribution](length, k, shared, own))
    values = (1.0 + own.standard_exponential(indices.size)) * own.choice([-1.0, 1.0], indices.size)
    return SparseVector(indices.astype(index_dtype(length)), values.astype(np.float32), length)


def uniform(length: int, k: int, shared: Random, own: Random) -> Array:
    if length < _LONG or 4 * k > length:
        # No shuffle: the caller sorts the positions.
        return own.choice(length, k, replace=False, shuffle=False)
    drawn = np.unique(own.integers(length, size=k))
    # Replace duplicates; at most a quarter of the draws, as k is at most a quarter of the length.
    while drawn.size < k:
        drawn = np.union1d(drawn, own.integers(length, size=k - drawn.size))
    return drawn


def clustered(length: int, k: int, shared: Random, own: Random) -> Array:
    runs = min(max(1, k // RUN), length // RUN)
    starts = RUN * shared.choice(max(1, length // RUN), runs, replace=False)
    hot = (starts[:, None] + np.arange(RUN)).reshape(-1)
    hot_picks = own.choice(hot, min(k // 2, hot.size), replace=False)
    return np.union1d(hot_picks, uniform(length, k - hot_picks.size, shared, own))


DISTRIBUTIONS: Final[dict[str, Callable[[int, int, Random, Random], Array]]] = {
    "uniform": uniform,
    "clustered": clustered,
}


SCHEMA: Final = 1


class Record(TypedDict):
    """One contender in one case.

    modelled_link: latency in seconds, seconds per byte, and burst bytes; measured or given.
    modelled_wire_seconds: from latency and bandwidth alone; None for contenders without a model.
    modelled_code_seconds: encode, decode and merge; if ranks share cores, multiplied by the ranks
                           per core, plus the work on the other ranks' messages.
    cpu_seconds: CPU time of a rank's process.
    measured_over_modelled: median time / modelled_wire_seconds.
    measured_over_wire_and_code: median time / (modelled_wire_seconds + modelled_code_seconds).
    interface_bytes: bytes sent according to the network interface, including headers,
                     acknowledgements and barriers; None if no interface was given.
    """

    contender: str
    label: str
    ours: bool
    reference: bool  # gtopk in the format that the model prefers; divides the others' times
    selective: bool  # True: reads only the picks; False: its time holds for every density
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
    counted: bool  # True: sent bytes were counted per message; False: calculated
    interface_bytes: PerRank | None
    updated: int  # coordinates that the update holds
    modelled_link: list[float]
    modelled_wire_seconds: float | None
    modelled_code_seconds: float | None
    measured_over_modelled: float | None
    measured_over_wire_and_code: float | None


class Results(TypedDict):
    """The whole file; run: the options, the modelled link, and the participating ranks."""

    schema: int
    benchmark: str
    machine: Machine
    run: dict[str, Any]
    records: list[Record]
