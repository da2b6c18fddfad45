"""Plan: what is to be measured."""

from __future__ import annotations

from typing import NamedTuple


class Plan(NamedTuple):
    """One run; every rank has the same.

    ranks:     how many of the launched ranks take part, one measurement after the other; none: all.
    formats:   that gtopk's algorithms send: "packed+bf16", or "bf16" for the one the model picks.
    bandwidth, latency: of the model's link, bits per second and seconds; None: as measured.
    shared_cores: of all ranks together; None: as many as are found.
    interface: whose sent bytes are noted; None: nobody's.
    """

    command: str
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    densities: tuple[float, ...]
    distributions: tuple[str, ...]
    algorithms: tuple[str, ...]
    baselines: tuple[str, ...]
    formats: tuple[str, ...]
    rounds: int
    budget_seconds: float
    bandwidth: float | None
    latency: float | None
    shared_cores: int | None
    interface: str | None
    seed: int

    def check(self, size: int) -> None:
        """Raise ValueError for what cannot be measured on `size` ranks."""
        for ranks in self.ranks:
            if ranks > size:
                raise ValueError(
                    f"--ranks must lie in 1..{size} (the ranks that were started), got {ranks}"
                )
        if self.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {self.rounds}")
        if self.shared_cores is not None and self.shared_cores < 1:
            raise ValueError(f"--shared-cores must be at least 1, got {self.shared_cores}")
