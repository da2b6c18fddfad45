"""Platform: a tree of hosts, switches and sites, as SimGrid is told to make it.

site 0                            site 1        far       between sites
switch          switch            ...           uplink    of a switch, to all others of a site
node  node ...  node  node ...                  link      of a node, shared by its ranks
rank rank                                       inside    of a rank, to its own node
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from collectives.cost import Link
from collectives.planning import Network

NODES_PER_SWITCH = 32
MOST_NODES_PER_SWITCH = 1 << 20
_AT_ONCE = 1e15  # bytes a second of a link on which bytes take no time


class Platform(NamedTuple):
    """A network's ranks on a tree.

    oversubscription: of a switch's uplink: its nodes' links over it; 1: nothing is lost there.
    sites: over which the switches are dealt; far: the link of each, to the others.
    """

    network: Network
    nodes_per_switch: int = NODES_PER_SWITCH
    oversubscription: float = 1.0
    sites: int = 1
    far: Link | None = None

    def check(self) -> None:
        """Raise ValueError for a tree that cannot be."""
        if self.nodes_per_switch < 1 or self.oversubscription < 1.0:
            raise ValueError("a switch needs a node, and an uplink no wider than its nodes' links")
        if self.nodes_per_switch > MOST_NODES_PER_SWITCH:
            raise ValueError(f"nodes of a switch must be at most {MOST_NODES_PER_SWITCH:,}")
        if not 1 <= self.sites <= len(self.switches()):
            raise ValueError(
                f"sites must lie in 1..{len(self.switches())}, the number of switches, got "
                f"{self.sites}; --nodes-per-switch makes more of them"
            )
        if self.sites > 1 and self.far is None:
            raise ValueError("several sites need a link between them: --site-bandwidth")

    def switches(self) -> list[list[list[int]]]:
        """Return ranks by node, by switch."""
        ranks, per_node = range(self.network.ranks), self.network.ranks_per_node
        nodes = [list(ranks[first : first + per_node]) for first in ranks[::per_node]]
        step = self.nodes_per_switch
        return [nodes[first : first + step] for first in range(0, len(nodes), step)]

    def record(self) -> dict[str, Any]:
        """Return what the simulator is told; bandwidths in bytes, latencies in seconds of a hop."""
        switches = self.switches()
        dealt = [len(switches) * site // self.sites for site in range(self.sites + 1)]
        link = _hop(self.network.between)
        return {
            "alone": self.network.ranks_per_node == 1,
            "sites": [switches[first:last] for first, last in itertools.pairwise(dealt)],
            "inside": _hop(self.network.within or self.network.between),
            "link": link,
            "uplink": [link[0] * self.nodes_per_switch / self.oversubscription, 0.0],
            "far": _hop(self.far) if self.far else None,
            "burst": self._burst(),
        }

    def _burst(self) -> list[float]:
        """Return bytes that pass at once after a pause, and bytes a second that fill it again."""
        link = self.network.between
        if not (link.burst_bytes and link.seconds_per_byte):
            return [0.0, 0.0]
        if self.network.ranks_per_node > 1:
            raise ValueError("a link's burst is replayed for one rank a node only")
        return [link.burst_bytes, 1.0 / link.seconds_per_byte]


def _hop(link: Link) -> list[float]:
    """Return bandwidth and latency of one of the two hops that make up a link."""
    bandwidth = 1.0 / link.seconds_per_byte if link.seconds_per_byte else _AT_ONCE
    return [bandwidth, link.latency_seconds / 2]
