"""The host tree has every rank once, and links with the requested rates."""

from __future__ import annotations

import pytest

from collectives.cost import Link
from collectives.cost_model import Network
from mpi_scripts.replay.simulate import Platform

NETWORK = Network(10, Link.of(1e9, 1e-4), 2, Link.of(1e11, 2e-6))


def test_platform_places_ranks_on_nodes_switches_and_sites() -> None:
    platform = Platform(NETWORK, nodes_per_switch=2, sites=2, far=Link.of(1e8, 0.02))
    platform.check()
    first, second = platform.record()["sites"]
    assert first == [[[0, 1], [2, 3]]]
    assert second == [[[4, 5], [6, 7]], [[8, 9]]]


def test_platform_halves_link_latency_and_narrows_the_uplink() -> None:
    platform = Platform(NETWORK, nodes_per_switch=4, oversubscription=4.0)
    record = platform.record()
    assert record["link"] == pytest.approx([1.25e8, 5e-5])
    assert record["inside"] == pytest.approx([1.25e10, 1e-6])
    assert record["uplink"] == pytest.approx([1.25e8, 0.0])
    assert record["far"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes_per_switch": 0}, "a switch needs a node"),
        ({"nodes_per_switch": 10**400}, "must be at most 1,048,576"),
        ({"oversubscription": 0.5}, "no wider than its nodes' links"),
        ({"sites": 2}, r"sites must lie in 1\.\.1"),
        ({"sites": 2, "nodes_per_switch": 1}, "need a link between them"),
    ],
)
def test_impossible_platform_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Platform(NETWORK, **options).check()
