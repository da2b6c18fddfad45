"""Classes: which ranks of a modelled cluster are fast, as GPUs are beside CPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...adaptive.hogbatch.sizes import Thresholds


@dataclass(frozen=True)
class Classes:
    """What only hogbatch asks of a cluster.

    fast: ranks; the others are slow.
    overhead_seconds: of a fast rank's every batch; None: the cluster's.
    sizes: the smallest and the largest batch of "slow" and "fast".
    """

    fast: Collection[int] = (0,)
    overhead_seconds: float | None = None
    sizes: Mapping[str, Thresholds] = field(
        default_factory=lambda: {"slow": Thresholds(4, 64), "fast": Thresholds(32, 256)}
    )

    def name(self, rank: int) -> str:
        """Return the class of a rank."""
        return "fast" if rank in self.fast else "slow"
