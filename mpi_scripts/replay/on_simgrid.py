"""Replays a trace on a platform, both JSON on stdin; run by a Python that has SimGrid.

Every rank is an actor that follows the trace. Its messages leave in order, one after the other,
whether or not the receiver already waits for them. A receive waits for the bytes, then for the
latency, for which no sender waits. The messages on a link share it fairly, in each direction
separately. Prints the simulated seconds until the last rank is done; fails if a rank waits for a
message that nobody sends. It imports nothing of gtopk, which may run on another Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, this_actor

# Plain max-min sharing by latency and bandwidth, without the factors of a TCP model.
SETTINGS = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
    "contexts/stack-size:64",
)
FREE = [1e15, 0.0]  # bytes a second, and seconds
_QUIET = "--log=root.thresh:error"


def connect(parent: Any, child: Any, gateway: Any, hop: list[float], name: str) -> None:
    """Join a host, or a zone by its gateway, to its parent zone, which is a switch.

    The link has no latency: SimGrid's would delay the sender. (See `replay`.)
    """
    link = parent.create_split_duplex_link(name, hop[0]).seal()
    route = [LinkInRoute(link, LinkInRoute.UP)]
    parent.add_route(child, None, gateway, None, route, True)


def add_gateway(zone: Any, name: str) -> Any:
    """Return a zone's gateway, in a zone of its own: SimGrid needs all at the same depth."""
    edge = NetZone.create_star_zone(f"edge-{name}").set_parent(zone)
    gateway = edge.create_router(f"gateway-{name}")
    edge.seal()
    connect(zone, edge.netpoint, gateway, FREE, f"out-{name}")
    return gateway


def build(platform: dict[str, Any]) -> dict[int, Any]:
    """Make the zones, and return the host of every rank."""
    hosts: dict[int, Any] = {}
    root = NetZone.create_star_zone("root")
    for s, switches in enumerate(platform["sites"]):
        site = NetZone.create_star_zone(f"site{s}").set_parent(root)
        for w, nodes in enumerate(switches):
            switch = NetZone.create_star_zone(f"switch{s}.{w}").set_parent(site)
            for n, ranks in enumerate(nodes):
                name = f"node{s}.{w}.{n}"
                if platform["alone"]:
                    hosts[ranks[0]] = host = switch.create_host(name, "1Gf").seal()
                    connect(switch, host.netpoint, None, platform["link"], f"link-{name}")
                    continue
                node = NetZone.create_star_zone(name).set_parent(switch)
                for rank in ranks:
                    hosts[rank] = host = node.create_host(f"rank{rank}", "1Gf").seal()
                    connect(node, host.netpoint, None, platform["inside"], f"inside-{rank}")
                gateway = node.create_router(f"gateway-{name}")
                node.seal()
                connect(switch, node.netpoint, gateway, platform["link"], f"link-{name}")
            name = f"switch{s}.{w}"
            router = f"gateway-{name}"
            gateway = (
                switch.create_router(router) if platform["alone"] else add_gateway(switch, name)
            )
            switch.seal()
            connect(site, switch.netpoint, gateway, platform["uplink"], f"uplink{s}.{w}")
        gateway = add_gateway(site, f"site{s}")
        site.seal()
        connect(root, site.netpoint, gateway, platform["far"] or FREE, f"far{s}")
    root.seal()
    return hosts


def latencies(platform: dict[str, Any]) -> Callable[[int, int], float]:
    """Return a function for the latency between two ranks: the hops below their common zone."""
    sites = platform["sites"]
    places = {
        rank: (s, w, n, rank)
        for s, switches in enumerate(sites)
        for w, nodes in enumerate(switches)
        for n, ranks in enumerate(nodes)
        for rank in ranks
    }
    inside = FREE if platform["alone"] else platform["inside"]
    hops = [platform["far"] or FREE, platform["uplink"], platform["link"], inside]

    def between(one: int, other: int) -> float:
        level = next(each for each in range(4) if places[one][each] != places[other][each])
        return float(2 * sum(latency for _, latency in hops[level:]))

    return between


def replay(
    rank: int,
    events: list[list[int]],
    latency: Callable[[int, int], float],
    burst: list[float],
    computing: list[float] | None,
    waiting: set[int],
) -> None:
    """Replay one rank; bytes that fit its token bucket, full at first, take no bandwidth.

    computing: its seconds before each event, and after the last.
    waiting: the ranks that are not done yet.
    """
    most, rate = burst
    tokens, since = most, 0.0
    for number, (peer, size) in enumerate(events):
        if computing is not None:
            this_actor.sleep_for(computing[number])
        if size < 0:
            left: list[float] = Mailbox.by_name(f"{peer}>{rank}").get()
            # Empty: the last byte leaves just now, and the sender has not noted it yet.
            leaving = left[0] if left else Engine.clock
            this_actor.sleep_until(leaving + latency(peer, rank))
            continue
        tokens = min(most, tokens + rate * (Engine.clock - since))
        slow = max(0.0, size - tokens)
        tokens = max(0.0, tokens - size)
        since = Engine.clock + (slow / rate if rate else 0.0)  # the bucket fills meanwhile
        left = []  # when the message's last byte left
        Mailbox.by_name(f"{rank}>{peer}").put(left, int(slow))
        left.append(Engine.clock)
    if computing is not None:
        this_actor.sleep_for(computing[-1])
    waiting.remove(rank)


def main() -> None:
    """Read, replay, and print the seconds."""
    request = json.load(sys.stdin)
    engine = Engine(["replay", _QUIET, *(f"--cfg={setting}" for setting in SETTINGS)])
    hosts = build(request["platform"])
    latency, burst = latencies(request["platform"]), request["platform"]["burst"]
    profile = request["computing"] or [None] * len(request["trace"])
    waiting = set(hosts)
    for rank, (events, computing) in enumerate(zip(request["trace"], profile, strict=True)):
        arguments = rank, events, latency, burst, computing, waiting
        actor = Actor.create(f"rank{rank}", hosts[rank], replay, *arguments)
        for peer in {peer for peer, size in events if size < 0}:
            Mailbox.by_name(f"{peer}>{rank}").set_receiver(actor)  # sent even before a receive
    engine.run()
    if waiting:  # SimGrid itself raises no error
        sys.exit(f"ranks {sorted(waiting)[:8]} wait for messages that no rank sends or receives")
    print(json.dumps({"seconds": Engine.clock}))


if __name__ == "__main__":
    main()
