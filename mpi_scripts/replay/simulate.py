"""Simulates a reduction's trace on a platform, with a Python on this machine that has SimGrid.

Platform: a tree of hosts, switches and sites, which becomes SimGrid's zones.

site 0                            site 1        far       between sites
switch          switch            ...           uplink    of a switch, to all others of a site
node  node ...  node  node ...                  link      of a node, shared by its ranks
rank rank                                       inside    of a rank, to its own node
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from collectives.cost import Link
from collectives.cost_model import Network
from gtopk import settings

from .traces import Profile, Trace

NODES_PER_SWITCH = 32
MOST_NODES_PER_SWITCH = 1 << 20
_AT_ONCE = 1e15  # bytes a second: a link on which bytes take no time


class Platform(NamedTuple):
    """A network's ranks on a tree.

    oversubscription: the summed bandwidth of a switch's nodes over that of its uplink; 1: none.
    sites: number of sites over which switches are spread; far: the link of each to the others.
    """

    network: Network
    nodes_per_switch: int = NODES_PER_SWITCH
    oversubscription: float = 1.0
    sites: int = 1
    far: Link | None = None

    def check(self) -> None:
        """Raise ValueError if the tree is impossible."""
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
        ranks, per_node = range(self.network.ranks), self.network.ranks_per_node
        nodes = [list(ranks[first : first + per_node]) for first in ranks[::per_node]]
        step = self.nodes_per_switch
        return [nodes[first : first + step] for first in range(0, len(nodes), step)]

    def record(self) -> dict[str, Any]:
        """Return the simulator's input; bandwidths in bytes, latencies in seconds, by hop."""
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
        """Return a token bucket: bytes that pass at once, and bytes per second that fill it."""
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


_PROGRAM: Final = Path(__file__).with_name("on_simgrid.py")


class SimulationError(RuntimeError):
    """SimGrid is missing, or a replay failed."""


def find_python() -> str:
    """Return a Python that has SimGrid: that of GTOPK_SIMGRID_PYTHON, this one, or the system's.

    Raises SimulationError if none has it.
    """
    given = settings.SIMGRID_PYTHON.read()
    tried = [given] if given else [sys.executable, "/usr/bin/python3", shutil.which("python3")]
    for python in filter(None, tried):
        try:
            found = subprocess.run(
                [python, "-c", "from simgrid import Engine"], capture_output=True, check=False
            )
        except OSError:  # missing, or not executable
            continue
        if found.returncode == 0:
            return python
    raise SimulationError(
        f"simulating needs SimGrid's Python module, which {', '.join(filter(None, tried))} does "
        f"not have: apt-get install python3-simgrid (Debian), or name a Python that has it in "
        f"{settings.SIMGRID_PYTHON.name}"
    )


def simulate(
    trace: Trace, platform: Platform, python: str, computing: Profile | None = None
) -> float:
    """Return the simulated seconds until the last rank is done with its messages.

    computing: the ranks' seconds between messages, in which token buckets fill; None: no computing.
    Raises ValueError if it does not fit the trace, or the trace does not fit the platform's ranks.
    Raises SimulationError if the replay fails.
    """
    platform.check()
    if len(trace) != platform.network.ranks:
        raise ValueError(
            f"the trace has {len(trace):,} ranks, and the platform {platform.network.ranks:,}"
        )
    if computing is not None and [*map(len, computing)] != [len(each) + 1 for each in trace]:
        raise ValueError("computing needs seconds before each event of a rank, and after the last")
    request = json.dumps({"platform": platform.record(), "trace": trace, "computing": computing})
    try:
        process = subprocess.run(
            [python, str(_PROGRAM)],
            input=request,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise SimulationError(f"{python} cannot be run: {error.strerror}") from None
    if process.returncode or not process.stdout:
        raise SimulationError(
            f"SimGrid failed on {len(trace):,} ranks, each a thread, which may be more than the "
            f"system allows; exit code {process.returncode}: {process.stderr.strip()[-500:]}"
        )
    return float(json.loads(process.stdout.splitlines()[-1])["seconds"])
