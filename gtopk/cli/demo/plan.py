"""The demo's plan: its settings, and the four methods that are compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from collectives.algorithms.gtopk import USUAL_GROWTH

from ...compression import Compression, SparseCompression

TRAIN_IMAGES, TEST_IMAGES = 1437, 360  # of scikit-learn's digits
PROGRESS = "@progress "  # begins the lines of JSON by which rank 0 tells how far it is


@dataclass(frozen=True)
class Plan:
    """The settings of one demo, the same on every rank."""

    ranks: int = 4
    seeds: int = 5
    epochs: int = 30
    batch: int = 32  # samples per rank and step
    density: float = 0.01  # of top-k, and of gTop-k at equal k
    lr: float = 0.05
    momentum: float = 0.9  # dense: the optimizer's; sparse: taken before the selection
    hidden: int = 256
    link: str = "100mbit"  # emulated, once all was run on the machine as it is

    def to_json(self) -> str:
        """Return the plan as one command-line word."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        return cls(**json.loads(text))

    def steps_per_epoch(self) -> int:
        """Return how often the ranks together find a full batch in the training images."""
        return TRAIN_IMAGES // (self.batch * self.ranks)

    def most_ranks(self) -> int:
        """Return the largest number of ranks that the training images are enough for."""
        return TRAIN_IMAGES // self.batch

    def runs(self) -> int:
        """Return the number of trainings: every method and seed, and those over the link."""
        return self.seeds * len(self.methods()) + len(self.over_link())

    def over_link(self) -> list[Method]:
        """Return the methods also run over the emulated link, with one seed; empty for one rank."""
        return [self.methods()[0], self.methods()[2]] if self.ranks > 1 else []

    def methods(self) -> list[Method]:
        """Return the compared methods, in the order of the report."""
        equal = equal_bytes_density(self.density, self.ranks)
        return [
            Method("dense", "dense allreduce", Compression.none),
            Method("topk", "top-k allgather", self._sparse(Compression.topk, self.density)),
            Method("gtopk", "gTop-k, equal k", self._sparse(Compression.gtopk, self.density)),
            Method(
                "gtopk-equal-bytes", "gTop-k, equal bytes", self._sparse(Compression.gtopk, equal)
            ),
        ]

    def _sparse(self, kind: type[SparseCompression], density: float) -> SparseCompression:
        return kind(density, momentum_correction=self.momentum)


@dataclass(frozen=True)
class Method:
    """One way to add up the gradients."""

    name: str
    label: str
    compression: Any

    @property
    def sparse(self) -> bool:
        return isinstance(self.compression, SparseCompression)

    @property
    def density(self) -> float:
        """Return the share of the entries that a rank selects."""
        return float(self.compression.density) if self.sparse else 1.0


def equal_bytes_density(density: float, ranks: int, growth: float = USUAL_GROWTH) -> float:
    """Return the density at which gTop-k sends what top-k allgather sends at `density`.

    Lists sent by all ranks together: P (P-1) by the allgather; by gTop-k log2(p) from each of the p
    ranks of the largest power of two, and for each rank beyond it its picks, and the result, which
    is `growth` (at most 2) lists long.
    """
    if ranks == 1:
        return density
    paired = 1 << (ranks.bit_length() - 1)
    lists = paired * (paired.bit_length() - 1) + (1 + growth) * (ranks - paired)
    return min(1.0, density * ranks * (ranks - 1) / lists)
