"""Cluster: how many seconds a rank's batch and the ranks' reduction take; a model, not a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from collectives.cost import Link
from collectives.planning import DEFAULT_RATES, Candidate, Network, predict

GIGABIT: Final = Link.of(1e9, 50e-6)


@dataclass(frozen=True)
class Slowdown:
    """A rank computes `factor` times as long from a second on."""

    rank: int
    factor: float
    second: float


@dataclass(frozen=True)
class Death:
    """A rank is gone from a second on."""

    rank: int
    second: float


@dataclass(frozen=True)
class Cluster:
    """A batch of b samples takes a rank (overhead + b / speed) seconds, times the noise.

    speeds: samples a second, by rank.
    deaths: of ranks; only replicas that are merged can go on without one.
    overhead_seconds: of every batch, whatever its size.
    noise: standard deviation of the logarithm of what a batch takes.
    link: between any two ranks; each sits on a node of its own.
    exchange_seconds: of a reduction, in place of what the link's model says.
    """

    speeds: Sequence[float]
    overhead_seconds: float = 0.0
    noise: float = 0.0
    slowdowns: Sequence[Slowdown] = ()
    deaths: Sequence[Death] = ()
    link: Link = GIGABIT
    exchange_seconds: float | None = None

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return len(self.speeds)

    def compute_seconds(
        self, rank: int, samples: float, second: float, random: np.random.Generator
    ) -> float:
        """Return what a batch takes that a rank begins at a second.

        samples: or their work, where some have more than others.
        """
        if samples == 0:
            return 0.0
        factor = 1.0
        for slowdown in self.slowdowns:
            if slowdown.rank == rank and second >= slowdown.second:
                factor *= slowdown.factor
        noise = float(np.exp(self.noise * random.standard_normal()))
        return factor * noise * (self.overhead_seconds + samples / self.speeds[rank])

    def reduce_seconds(self, candidate: Candidate, length: int) -> float:
        """Return what a reduction takes on the wire, by the schedule of its algorithm."""
        if self.exchange_seconds is not None:
            return self.exchange_seconds
        network = Network(self.ranks, self.link)
        return predict(candidate, length, network, DEFAULT_RATES).communicate_seconds

    def signal_seconds(self) -> float:
        """Return what it takes until all ranks know that all are ready."""
        return self.link.latency_seconds * (self.ranks - 1).bit_length()

    def noises(self, seed: int) -> list[np.random.Generator]:
        """Return every rank's source of noise."""
        return [np.random.default_rng([seed, rank]) for rank in range(self.ranks)]
