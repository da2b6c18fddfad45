"""A kept calibration is used only if reductions still take as long as it says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from collectives import run_ranks
from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Calibration, Network, calibrate
from collectives.cost_model.cache import LONG_SECONDS, links_unchanged
from collectives.cost_model.calibration import measure_network
from collectives.transports import local_world

HOSTS = Calibration(Network(3, Link.of(100e6, 2e-3)), DEFAULT_RATES, "kept")
SWAP = 2 * 2e-3  # a barrier of 3 ranks
LONG = LONG_SECONDS + 4 * 2e-3  # a reduction of 4 rounds


class Durations:
    """A clock by which successive runs take these seconds, and all further ones the last."""

    def __init__(self, *seconds: float) -> None:
        self._left, self._now, self._is_running = list(seconds), 0.0, False

    def __call__(self) -> float:
        if self._is_running:
            self._now += self._left.pop(0) if len(self._left) > 1 else self._left[0]
        self._is_running = not self._is_running
        return self._now


@pytest.mark.parametrize(
    ("barriers", "reductions", "holds"),
    [
        ([SWAP] * 3, [LONG] * 3, True),
        ([SWAP] * 3, [0.6 * LONG] * 3, True),
        ([SWAP] * 3, [1.9 * LONG] * 2, True),
        ([SWAP + 1.0], [LONG], False),  # after one so long there is no other
        ([10 * SWAP] * 3, [LONG] * 3, False),  # more latency
        ([SWAP] * 3, [9 * SWAP, LONG / 4, LONG], False),  # more bandwidth
        ([SWAP] * 3, [5 * LONG], False),  # less bandwidth
        ([SWAP] * 3, [1.8 * LONG, LONG], True),  # disturbed once
    ],
)
def test_links_are_unchanged_within_twice_and_half_the_time(
    barriers: Sequence[float], reductions: Sequence[float], holds: bool
) -> None:
    unchanged = run_ranks(
        local_world(3, 30, node_size=1),
        lambda transport: links_unchanged(transport, HOSTS, Durations(*barriers, *reductions)),
    )
    assert unchanged == [holds] * 3


def test_ranks_that_start_a_latency_apart_find_their_link_unchanged() -> None:
    """An early rank takes twice as long as one that finds the other's message there."""
    latency_seconds = 20e-3
    kept = Calibration(Network(2, Link.of(100e6, latency_seconds)), DEFAULT_RATES, "kept")
    reduction = LONG_SECONDS + 2 * latency_seconds

    def clock(rank: int) -> Durations:
        apart = (0.9 if rank == 0 else -0.9) * latency_seconds
        barriers = [1.3 * latency_seconds + apart] * 2
        return Durations(*barriers, reduction + apart)

    unchanged = run_ranks(
        local_world(2, 30, node_size=1),
        lambda transport: links_unchanged(transport, kept, clock(transport.rank)),
    )
    assert unchanged == [True, True]


def test_reduced_bandwidth_is_detected_on_a_link_of_high_latency() -> None:
    """The latencies of long messages and of acknowledgements do not count as time of bytes."""
    link = Link.of(10e9, 10e-3)
    kept = Calibration(Network(2, link), DEFAULT_RATES, "kept")
    array_seconds = LONG_SECONDS / 2 + 4 * link.latency_seconds
    for seconds, holds in ((array_seconds, True), (array_seconds + 10 * LONG_SECONDS, False)):
        unchanged = run_ranks(
            local_world(2, 30, node_size=1),
            lambda transport, seconds=seconds: links_unchanged(
                transport, kept, Durations(*[link.latency_seconds] * 3, seconds)
            ),
        )
        assert unchanged == [holds] * 2


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (3, 1), (5, 1), (2, 8), (3, 4)])
def test_calibration_holds_until_the_latency_changes(
    virtual, nodes: int, ranks_per_node: int
) -> None:
    """With many ranks on a host, an agreement takes less than log2 P latencies between hosts."""
    size, within = nodes * ranks_per_node, Link(5e-6, 1e-10)

    def world_of(latency_seconds: float):
        return virtual(size, Link.of(1e9, latency_seconds), within, ranks_per_node)

    world = world_of(10e-3)
    network, _ = run_ranks(world.world, lambda t: measure_network(t, world.clock(t.rank)))[0]
    kept = Calibration(network, DEFAULT_RATES, "kept")
    for latency_seconds, holds in ((10e-3, True), (25e-3, False), (3e-3, False)):
        world = world_of(latency_seconds)
        unchanged = run_ranks(
            world.world,
            lambda t, world=world: links_unchanged(t, kept, world.clock(t.rank)),
        )
        assert unchanged == [holds] * size


def test_recheck_reduces_twice_the_token_bucket() -> None:
    burst_bytes = 1 << 20
    kept = Calibration(
        Network(2, Link(2e-4, 8e-8, burst_bytes), agreement_seconds=2e-4), DEFAULT_RATES, "kept"
    )
    reduced: list[int] = []

    def program(transport) -> bool:
        transport.allreduce = lambda array: reduced.append(array.nbytes)
        return links_unchanged(transport, kept, Durations(2e-4))

    run_ranks(local_world(2, 30, node_size=1), program)
    assert set(reduced) == {2 * burst_bytes}


def test_recheck_within_one_host_measures_nothing() -> None:
    def no_clock() -> float:
        raise AssertionError

    one_host = Calibration(Network(3, Link.of(1e9, 1e-5), 3), DEFAULT_RATES, "kept")
    world = local_world(3, 30)
    assert run_ranks(world, lambda each: links_unchanged(each, one_host, no_clock)) == [True] * 3
    assert world[0].traffic.read_and_reset().sent_messages == 0


def test_outdated_calibration_is_measured_again_and_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    from collectives.cost_model import cache

    monkeypatch.setenv("GTOPK_CALIBRATION", str(tmp_path / "kept.json"))
    checked_calibrations: list[Calibration] = []

    def refuse(transport, calibration, clock) -> bool:
        checked_calibrations.append(calibration)
        return False

    monkeypatch.setattr(cache, "links_unchanged", refuse)

    def origins() -> list[str]:
        found = run_ranks(local_world(2, 30, node_size=1), calibrate)
        return [each.origin for each in found]

    first = origins()
    assert not checked_calibrations  # none was cached yet
    again = origins()
    assert len(checked_calibrations) == 2
    assert all(origin.endswith(": the cached one is out of date") for origin in again)
    assert first == [first[0]] * 2
    assert again == [again[0]] * 2
