"""Network: how many ranks there are, where they sit, and what their links are like."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from ..cost import Link, rounds

_ROUNDING: Final = 1e-9  # of a ratio of two whole numbers


class Network(NamedTuple):
    """Ranks on nodes; rank r is on node r // ranks_per_node.

    between: the link of a node, shared by all its ranks. within: a rank's own link to its node.
    allreduce: the link of which an allreduce of this size makes the most, where one was measured;
               None: the links above, without loss.
    native_bytes: from here on an allreduce is the library's own, and no words answer its messages;
                  None: none is.
    ranks_per_core: that share a core where most do; 1: each has one of its own.
    agreement_seconds: what it takes until all have heard a word of each, as they must before every
                       reduction of a training; None: ceil(log2 P) latencies.
    """

    ranks: int
    between: Link
    ranks_per_node: int = 1
    within: Link | None = None
    allreduce: Link | None = None
    agreement_seconds: float | None = None
    native_bytes: int | None = None
    ranks_per_core: float = 1.0

    @property
    def is_one_node(self) -> bool:
        """Tell whether no message leaves its node."""
        return self.ranks <= self.ranks_per_node

    @property
    def farthest(self) -> Link:
        """Return the link of a rank to those that are farthest away."""
        return self.link(int(not self.is_one_node))

    @property
    def expected_agreement_seconds(self) -> float:
        """Return what was measured, else what is to be expected of the links."""
        if self.agreement_seconds is not None:
            return self.agreement_seconds
        return rounds(self.ranks) * self.farthest.latency_seconds

    def turns(self, ranks: int) -> int:
        """Return in how many turns so many ranks code that do so at the same time."""
        return max(1, math.ceil(self.ranks_per_core * ranks / self.ranks - _ROUNDING))

    def link(self, leaving: int) -> Link:
        """Return what a rank gets of the link when `leaving` ranks of its node use it at once."""
        if leaving == 0 and self.within is not None:
            return self.within
        sharing = max(1, leaving)
        return self.between._replace(seconds_per_byte=self.between.seconds_per_byte * sharing)

    def scaled(self, factor: float) -> Network:
        """Return the network on which every message takes `factor` times as long."""
        return self._replace(
            between=self.between.scaled(factor),
            within=self.within and self.within.scaled(factor),
            allreduce=self.allreduce and self.allreduce.scaled(factor),
            agreement_seconds=self.agreement_seconds and factor * self.agreement_seconds,
        )
