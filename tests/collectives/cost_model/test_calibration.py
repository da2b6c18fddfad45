"""Calibration measures the links within its time budget, and all ranks agree on the result."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectives import run_ranks
from collectives.cost import Link, rounds
from collectives.cost_model import DEFAULT_RATES, Candidate, Network, predict, probes
from collectives.cost_model.calibration import (
    ALLREDUCE_SECONDS,
    BETWEEN_SECONDS,
    WITHIN_SECONDS,
    _partners,
    assumed,
    measure,
    measure_network,
    measure_rates,
)
from collectives.cost_model.probes import (
    GROWTH,
    LONG_ALLREDUCE_BYTES,
    REPEATS,
    grow,
    link_of,
    seconds_per_unit,
)
from collectives.transports import LocalTransport, local_world
from collectives.transports.pacing import wire_bytes
from tests.matrix import some_of

FAST = Link(2e-6, 1e-10)
ETHERNET = Link.of(1e9, 50e-6)
LINKS = [FAST, ETHERNET, Link.of(5e6, 5e-3), Link.of(1e8, 50e-3), Link.of(1e9, 0.1)]
near = partial(pytest.approx, abs=0)  # the default, 1e-12, is too coarse for 4e-11 seconds per byte


def found_on(world) -> list[Network]:
    return [
        network
        for network, _ in run_ranks(world.world, lambda t: measure_network(t, world.clock(t.rank)))
    ]


def test_emulated_link_is_used_as_given_whatever_the_clock() -> None:
    link = Link.of(1e8, 4e-4)
    clock = itertools.count().__next__  # every measurement takes seconds

    def program(transport: LocalTransport) -> Network:
        transport.emulate(link)
        return measure_network(transport, clock)[0]

    for network in run_ranks(local_world(2), program):
        found = network.between
        assert network.within is None
        for message_bytes in (1448, 1448 * 700):
            on_the_wire = wire_bytes(message_bytes) * link.seconds_per_byte
            taken = found.latency_seconds + message_bytes * found.seconds_per_byte
            assert taken == near(link.latency_seconds + on_the_wire, rel=0.2)
        assert message_bytes * found.seconds_per_byte == near(on_the_wire, rel=1e-9)


@pytest.mark.parametrize(
    ("size", "link"),
    some_of(
        itertools.product([2, 3, 5, 8], LINKS),
        *itertools.product([2, 3], LINKS),
        *itertools.product([5, 8], [FAST, LINKS[-1]]),
    ),
    ids=repr,
)
def test_every_rank_measures_the_same_correct_link(virtual, size, link):
    of_all_ranks = found_on(virtual(size, link))
    assert of_all_ranks == [of_all_ranks[0]] * size
    assert of_all_ranks[0].between == near(link, rel=1e-6)
    assert of_all_ranks[0].within is None
    assert of_all_ranks[0].ranks_per_node == 1


def measure_with_probes(world, monkeypatch) -> Link:
    """Return rank 0's measurement of its link to rank 1."""

    def sleep(seconds: float) -> None:
        world.seconds[0] += seconds

    def program(transport) -> Link | None:
        if transport.rank == 1:
            return probes.follow_swaps(transport, 0, world.clock(1))
        return probes.lead_swaps(transport, 1, BETWEEN_SECONDS, world.clock(0))

    monkeypatch.setattr(probes, "time", SimpleNamespace(sleep=sleep))
    found, _ = run_ranks(world.world, program)
    return found


@pytest.mark.parametrize("link", [Link.of(5e6, 2e-4), Link.of(8e7, 2e-4), ETHERNET], ids=repr)
@pytest.mark.parametrize("burst_bytes", [3000, 12_000])
def test_token_bucket_is_measured_and_does_not_inflate_bandwidth(
    virtual, link, burst_bytes, monkeypatch
):
    link = link._replace(burst_bytes=burst_bytes)
    world = virtual(2, link)
    found = measure_with_probes(world, monkeypatch)
    assert found.seconds_per_byte == near(link.seconds_per_byte, rel=1e-6)
    assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=0.05)
    assert found.burst_bytes == pytest.approx(burst_bytes, rel=0.05)
    assert world.seconds[0] < 1.6 * BETWEEN_SECONDS


@pytest.mark.parametrize("link", [Link.of(4e7, 2e-4), Link.of(1.6e8, 2e-4)], ids=repr)
def test_per_call_overhead_does_not_hide_a_token_bucket(virtual, link, monkeypatch):
    """Receiving a piece takes at most as long as 640 of its bytes."""
    world = virtual(2, link._replace(burst_bytes=10_000), call_seconds=32e-6)
    assert measure_with_probes(world, monkeypatch).burst_bytes == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize(
    ("size", "slow"),
    some_of(
        [(n, rank) for n in (2, 3, 4, 5) for rank in range(n)],
        *((3, rank) for rank in range(3)),  # one of them left over
        *((2, 0), (4, 1), (5, 4)),
    ),
)
@pytest.mark.parametrize("ranks_per_node", [1, 5])
def test_slow_sender_limits_bandwidth_at_any_rank(virtual, size, slow, ranks_per_node):
    """For links between hosts, and inside a node."""
    world = virtual(size, FAST, FAST, ranks_per_node)
    world.link = lambda sender, to: ETHERNET if sender == slow else FAST
    network, *_ = found_on(world)
    assert network.between.seconds_per_byte == near(ETHERNET.seconds_per_byte, rel=1e-6)


@pytest.mark.parametrize("count", range(1, 10))
def test_partners_pair_all_ranks_and_a_left_over_rank_in_another_round(count):
    pairs, left_over = zip(*(_partners(place, count) for place in range(count)), strict=True)
    for round in (pairs, left_over):
        assert all(round[other] == place for place, other in enumerate(round) if other is not None)
    alone = [place for place in range(count) if {pairs[place], left_over[place]} == {None}]
    assert alone == ([0] if count == 1 else [])
    assert any(other is not None for other in left_over) == (count > 1 and count % 2 == 1)


@pytest.mark.parametrize("size", [4, 6, 9])
def test_links_within_and_between_nodes_are_measured_separately(virtual, size):
    network, *_ = found_on(virtual(size, ETHERNET, FAST, ranks_per_node=3))
    assert network.between == near(ETHERNET, rel=1e-6)
    assert network.within == near(FAST, rel=1e-6)
    assert network.ranks_per_node == 3


def test_ranks_not_in_node_order_are_modelled_with_one_shared_link(virtual):
    world = virtual(4, ETHERNET, FAST, ranks_per_node=2)
    world.link = lambda a, b: FAST if a % 2 == b % 2 else ETHERNET
    for transport in world.world:
        transport.neighbours = lambda rank=transport.rank: [rank % 2, rank % 2 + 2]
        transport.native_bytes = lambda: 1 << 30
    network, *_ = found_on(world)
    assert network.native_bytes == 1 << 30
    assert network.agreement_seconds == pytest.approx(2 * ETHERNET.latency_seconds, rel=0.5)
    assert network.ranks_per_node == 1
    assert network.within is None
    assert network.between.seconds_per_byte == near(2 * ETHERNET.seconds_per_byte, rel=1e-6)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_measured_allreduce_gives_the_links_bandwidth(virtual, size):
    """The allreduce's messages and bytes are known, so its time gives the link."""
    network, *_ = found_on(virtual(size, ETHERNET))
    latency_seconds, seconds_per_byte, _ = network.allreduce
    assert seconds_per_byte == near(ETHERNET.seconds_per_byte, rel=0.01)
    # An odd number of ranks leave an agreement, and so begin, at different times.
    assert latency_seconds == pytest.approx(ETHERNET.latency_seconds, rel=0.3)


@pytest.mark.parametrize("size", [2, 4])
def test_acknowledgement_latency_is_not_counted_as_bandwidth(virtual, size):
    """If acknowledgements take most of the time, the rest is no measure of the bytes."""
    for link, is_measured in ((Link.of(1e8, 2e-3), True), (Link.of(400e9, 30e-3), False)):
        network, *_ = found_on(virtual(size, link))
        assert (network.allreduce is not None) == is_measured
        if network.allreduce is not None:
            found = network.allreduce
            assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=0.02)
            assert found.seconds_per_byte == near(link.seconds_per_byte, rel=0.02)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize(
    ("link", "native"),
    [
        (Link.of(100e9, 25e-6), Link.of(100e9, 3e-6)),
        (Link.of(200e9, 40e-6), Link.of(200e9, 2e-6)),
        (Link.of(10e9, 1e-3), Link.of(10e9, 1e-3)),
        (Link.of(1e9, 10e-3), Link.of(1e9, 10e-3)),
    ],
    ids=repr,
)
def test_native_allreduce_is_modelled_without_acknowledgements(virtual, size, link, native):
    world = virtual(size, link)
    world.reduce_natively(native)
    network, *_ = found_on(world)
    assert network.native_bytes == 0
    assert network.allreduce == near(native, rel=1e-3)
    for length in (1 << 18, 1 << 20, 25_000_000):
        world.seconds[:] = [0.0] * size
        world.world[0].allreduce(np.empty(length, np.float32))
        found = predict(Candidate("dense"), length, network, DEFAULT_RATES)
        assert found.communicate_seconds == pytest.approx(world.seconds[0], rel=1e-3)
        assert found.rounds == 2 * rounds(size)


def test_allreduce_native_only_for_long_vectors_is_modelled_by_length(virtual):
    """As with gloo: only the largest probe has no acknowledgements."""
    size, native_bytes = 4, 1 << 24
    world = virtual(size, ETHERNET)
    world.reduce_natively(ETHERNET, native_bytes)
    network, *_ = found_on(world)
    assert network.native_bytes == native_bytes
    for length, answered in ((native_bytes // 4 - size, True), (native_bytes // 4, False)):
        world.seconds[:] = [begun := max(world.seconds) + 1.0] * size  # after a pause
        run_ranks(world.world, lambda t, length=length: t.allreduce(np.zeros(length, np.float32)))
        found = predict(Candidate("dense"), length, network, DEFAULT_RATES)
        assert found.communicate_seconds == pytest.approx(max(world.seconds) - begun, rel=1e-2)
        assert found.rounds == 2 * rounds(size) * (1 + answered)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_agreement_time_is_measured(virtual, size):
    link = Link(5e-3, 1e-9)
    network, *_ = found_on(virtual(size, link))
    latencies = (size - 1).bit_length() * link.latency_seconds
    assert network.agreement_seconds == pytest.approx(latencies, rel=0.02)
    unknown = network._replace(agreement_seconds=None)
    assert unknown.expected_agreement_seconds == pytest.approx(latencies, rel=0.02)
    for each in (network, unknown):
        agreement_seconds = each.expected_agreement_seconds
        assert each.scaled(3).expected_agreement_seconds == pytest.approx(3 * agreement_seconds)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 4), (3, 4)])
def test_agreement_time_is_the_mean_of_successive_agreements(virtual, nodes, ranks_per_node):
    """On unequal links some ranks finish a latency before others, and wait the next time."""
    size, link = nodes * ranks_per_node, Link(5e-3, 1e-9)
    world = virtual(size, link, FAST, ranks_per_node)
    network, *_ = found_on(world)
    runs, begun = 20, [*world.seconds]
    run_ranks(world.world, lambda t: [t.barrier() for _ in range(runs)])
    each = np.mean(np.subtract(world.seconds, begun)) / runs
    assert network.agreement_seconds == pytest.approx(each, rel=0.05)


@pytest.mark.parametrize("length", [1 << 20, 1 << 22])
def test_allreduce_time_is_the_mean_of_successive_allreduces(virtual, length):
    """Ranks of a host end some latencies apart; the slowest's time is 1.2 to 1.6 times as long."""
    size, ranks_per_node, link = 8, 4, Link(5e-3, 1e-9)
    world = virtual(size, link, FAST, ranks_per_node)
    network, *_ = found_on(world)
    runs, begun = 4, [*world.seconds]

    def program(transport) -> None:
        for _ in range(runs):
            transport.allreduce(np.zeros(length, np.float32))

    run_ranks(world.world, program)
    each = np.mean(np.subtract(world.seconds, begun)) / runs
    found = predict(Candidate("dense"), length, network, DEFAULT_RATES)
    assert found.communicate_seconds == pytest.approx(each, rel=0.15)


def test_slow_first_long_allreduces_are_not_counted(virtual):
    """The first three of each long size take half as long again."""
    world = virtual(2, ETHERNET)

    def open_windows(transport):
        allreduce, gone = transport.allreduce, Counter()

        def slow(array, *options):
            begun = world.seconds[transport.rank]
            allreduce(array, *options)
            gone[array.nbytes] += 1
            if array.nbytes >= LONG_ALLREDUCE_BYTES and gone[array.nbytes] <= 3:
                world.seconds[transport.rank] += 0.5 * (world.seconds[transport.rank] - begun)

        transport.allreduce = slow

    for transport in world.world:
        open_windows(transport)
    network, *_ = found_on(world)
    assert network.allreduce.bits_per_second == pytest.approx(ETHERNET.bits_per_second, rel=0.02)


def test_allreduce_too_slow_to_reach_long_sizes_is_left_unmeasured(virtual):
    network, *_ = found_on(virtual(3, Link.of(5e6, 1e-3)))
    assert network.allreduce is None
    assert network.between.bits_per_second == pytest.approx(5e6)


# The fixture is a class: there is nothing to reset.
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(2, 9),
    latency=st.floats(1e-6, 10e-3),
    bits_per_second=st.floats(1e5, 1e12),
)
def test_measuring_any_network_keeps_its_time_budget(virtual, size, latency, bits_per_second):
    link = Link.of(bits_per_second, latency)
    world = virtual(size, link)
    found_on(world)
    odd = size % 2  # a round more
    budget = WITHIN_SECONDS + (1 + odd) * BETWEEN_SECONDS + 2 * ALLREDUCE_SECONDS
    # Add the fixed time of about 16 runs of a link, of an allreduce if that is long, and of the
    # allgathers to agree.
    rounds = math.ceil(math.log2(size))
    link_run, allreduce_run = 2 * (64 * link.seconds_per_byte + latency), 2 * rounds * latency
    gathers = 40 * rounds * latency
    floors = max(0.75 * budget, 16 * (link_run + allreduce_run))
    assert max(world.seconds) <= budget + floors + gathers
    if latency <= 1e-3 and bits_per_second >= 1e6:
        assert max(world.seconds) < 1.9 + odd * BETWEEN_SECONDS


@settings(max_examples=200)
@given(
    st.floats(1e-9, 10),
    st.floats(0, 1e-2),
    st.integers(1, 100),
    st.integers(100, 10**7),
    st.floats(1e-3, 2),
)
def test_grow_keeps_its_time_budget_for_any_run_time(alpha, beta, smallest, largest, budget):
    spent = []

    def run(size: int) -> float:
        spent.append(alpha + beta * size)
        return spent[-1]

    samples = grow(run, smallest, largest, budget)
    # Add the fixed time of at most three runs of each size, or of one if that is long.
    floors = max(1.5 * budget, 14 * spent[0])
    assert sum(seconds - spent[0] for seconds in spent) <= budget * (1 + 1e-9)
    assert sum(spent) <= budget + floors
    sizes = sorted(samples)
    assert sizes[0] == smallest
    assert all(b <= GROWTH * a for a, b in itertools.pairwise(sizes))
    assert all(len(seconds) <= REPEATS for seconds in samples.values())


@settings(max_examples=200)
@given(st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-4), st.integers(0, 30), st.floats(0.1, 100))
def test_delayed_run_does_not_change_sizes_or_link(alpha, beta, delayed, by_seconds):
    def measured(delayed: int | None) -> dict[int, list[float]]:
        count = itertools.count()

        def run(size: int) -> float:
            return alpha + beta * size + by_seconds * (next(count) == delayed)

        return grow(run, 64, 1 << 22, 0.4)

    disturbed, undisturbed = measured(delayed), measured(None)
    assert list(disturbed) == list(undisturbed)
    assert link_of(disturbed) == pytest.approx(link_of(undisturbed))


def test_grow_accepts_runs_of_zero_seconds():
    assert list(grow(lambda size: 0.0 if size > 1 else 1.0, 1, 64, 0.5)) == [1]
    assert list(grow(lambda size: 0.0, 1, 64, 0.0)) == [1]
    assert list(grow(lambda size: 0.0, 1, 64, 1.0)) == [1, 8, 64]


def test_link_of_ignores_delayed_samples():
    link = link_of({64: [1.0, 9.0, 1.0], 512: [1.0], 1064: [3.0, 2.0, 2.0, 50.0, 2.0]})
    assert link == pytest.approx(Link(1.0 - 64 * 1e-3, 1e-3))


def test_link_of_one_size_counts_all_time_as_latency_and_as_bandwidth():
    assert link_of({64: [0.64]}) == Link(0.64, 0.01)


def test_seconds_per_unit_excludes_preparation():
    now = 0.0

    def prepare(size: int):
        nonlocal now
        now += 5e-8 * size

        def work() -> None:
            nonlocal now
            now += 3e-9 * size

        return work

    rate = seconds_per_unit(prepare, 1 << 10, 1 << 22, 0.2, lambda: now, lambda: now)
    assert rate == near(3e-9, rel=1e-6)
    assert now <= 0.2 + 1e-6


def test_measure_gives_all_ranks_the_same_calibration(virtual):
    size = 3
    world = virtual(size, ETHERNET)
    of_all_ranks = run_ranks(world.world, measure)
    assert of_all_ranks == [of_all_ranks[0]] * size
    rates = of_all_ranks[0].rates
    coding = next(iter(rates.coding.values()))
    of_entries = (rates.pick_seconds, rates.merge_seconds, rates.sum_seconds)
    numbers = [*of_entries, rates.select_seconds, rates.copy_seconds, *coding]
    assert all(0 < number < 1e-3 for number in numbers)
    assert "measured on 3 ranks of 3 hosts" in of_all_ranks[0].origin


def test_measured_rates_are_zero_when_the_clock_stands_still():
    rates = measure_rates(clock=lambda: 0.0, stopwatch=lambda: 0.0)
    assert rates.select_seconds == rates.pick_seconds == rates.merge_seconds == 0.0
    assert rates.sum_seconds == rates.copy_seconds == 0.0


def test_single_rank_has_rates_but_no_links():
    (calibration,) = run_ranks(local_world(1), measure)
    assert calibration.network == Network(1, Link(0.0, 0.0))
    assert calibration.rates.select_seconds > 0
    assert np.isfinite(calibration.rates.merge_seconds)


def test_assumed_calibration_says_that_it_is_assumed():
    assert "assumed" in assumed(4).origin
