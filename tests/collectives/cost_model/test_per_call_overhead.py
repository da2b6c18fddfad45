"""The per-call overhead is measured correctly at any latency, and if ranks begin at any offsets."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from collectives import run_ranks
from collectives.cost import Link, rounds
from collectives.cost_model import Network, Rates, per_call_overhead
from collectives.cost_model.network import DEFAULT_RATES, CodingRate
from collectives.cost_model.per_call_overhead import CALLS_SECONDS, measure_calls
from collectives.cost_model.schedules import GATHER_SENDS, SEARCH_SENDS
from collectives.transports import local_world
from collectives.wire import EXACT
from tests.matrix import some_of

CALL_SECONDS = 3e-4
WITHIN = Link(5e-6, 1e-10)
COSTLESS = Rates(0.0, 0.0, {EXACT: CodingRate(0.0, 0.0)})
LATENCIES = (5e-5, 5e-4, 5e-3, 20e-3)
ONE_EACH = [(size, 1) for size in (2, 3, 4, 5, 6, 7, 8, 12)]
SEVERAL_EACH = [(4, 2), (6, 3), (8, 4), (16, 8)]
# The smallest and largest latency, for few ranks (powers of two and others) and all nodes.
ALWAYS_RUN = [
    *((size, 1, latency) for size in (2, 3, 5) for latency in (5e-5, 20e-3)),
    *((7, 1, 5e-4), (8, 1, 5e-3), (4, 2, 5e-5), (4, 2, 20e-3), (6, 3, 5e-3), (8, 4, 5e-4)),
]


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace real sleeps, which virtual time does not need."""
    monkeypatch.setattr(per_call_overhead, "time", SimpleNamespace(sleep=lambda seconds: None))


def found_on(virtual, size: int, ranks_per_node: int, latency: float, apart: list[float]) -> Rates:
    """Return the measured rates if ranks begin `apart` latencies late."""
    within = WITHIN if ranks_per_node > 1 else None
    link = Link(latency, 1e-9)
    world = virtual(size, link, within, ranks_per_node, CALL_SECONDS)
    world.seconds[:] = [latency * each for each in apart]
    network = Network(size, link, ranks_per_node, within)
    found = run_ranks(
        world.world, lambda t: measure_calls(t, network, COSTLESS, world.clock(t.rank))
    )
    assert found == [found[0]] * size
    return found[0]


@pytest.mark.parametrize(
    ("size", "ranks_per_node", "latency"),
    some_of(
        [(*ranks, latency) for ranks in ONE_EACH + SEVERAL_EACH for latency in LATENCIES],
        *ALWAYS_RUN,
    ),
)
def test_overhead_is_the_time_of_few_entries_minus_their_messages(
    virtual, size, ranks_per_node, latency
):
    """Calls: a swap takes one; an allgather takes one per round, the first of them the swap.

    Ok-Topk takes one for each of P - 1 parts, and one per round of two allgathers. The overhead of
    its sends is this time minus the known overhead of its 3 (P - 1) lists.
    """
    group = ranks_per_node if ranks_per_node > 1 else size
    lists_seconds = (rounds(group) - 1) * CALL_SECONDS
    sends = group - 1 + SEARCH_SENDS + GATHER_SENDS
    sends_seconds = (group - 1 + 2 * rounds(group)) * CALL_SECONDS - 3 * lists_seconds
    uniform = random.Random(size)
    for apart in (
        [0.0] * size,
        [0.9, *[0.0] * (size - 1)],
        *([uniform.random() for _ in range(size)] for _ in range(3)),
    ):
        found = found_on(virtual, size, ranks_per_node, latency, apart)
        assert found.swap_seconds == pytest.approx(CALL_SECONDS, rel=0.05), apart
        assert found.list_seconds * (group - 1) == pytest.approx(
            lists_seconds, rel=0.05, abs=0.05 * CALL_SECONDS
        ), apart
        # Ranks that begin apart leave the barrier apart, and no ring evens this out here.
        reach = WITHIN.latency_seconds if ranks_per_node > 1 else latency * max(apart)
        assert found.send_seconds * sends == pytest.approx(
            sends_seconds, rel=0.01, abs=0.2 * reach
        ), apart


@pytest.mark.parametrize("rank", [0, 1, per_call_overhead._MAX_OKTOPK_RANKS - 1])
def test_even_picks_are_disjoint_and_equally_many_in_each_region(rank):
    """Ok-Topk's parts and blocks are then as even as its schedule assumes."""
    size = per_call_overhead._MAX_OKTOPK_RANKS
    mine, regions = per_call_overhead.even_picks(rank, size)
    other, _ = per_call_overhead.even_picks((rank + 1) % size, size)
    cut = regions.record()["cut"]
    per_region = np.histogram(mine.indices, cut[0])[0]
    assert per_region.tolist() == [mine.entries // size] * size
    assert cut[1] == list(range(size))
    assert cut[0][-1] == mine.length
    assert not np.intersect1d(mine.indices, other.indices).size


def test_send_overhead_is_measured_among_a_limited_number_of_ranks(virtual, monkeypatch):
    monkeypatch.setattr(per_call_overhead, "_MAX_OKTOPK_RANKS", 4)
    found = found_on(virtual, 9, 1, 5e-4, [0.0] * 9)
    sends = 3 + SEARCH_SENDS + GATHER_SENDS
    lists = 3 * 3 / 8 * (rounds(9) - 1)  # of nine ranks' allgather
    expected = (3 + 2 * 2 - lists) * CALL_SECONDS
    assert found.send_seconds * sends == pytest.approx(expected, abs=0.2 * 5e-4)


@pytest.mark.parametrize("size", some_of([17, 40], 17))
def test_send_overhead_accounts_for_another_search_round_of_many_regions(virtual, size):
    """Regression: lists too small for this round gave a negative overhead."""
    found = found_on(virtual, size, 1, 5e-4, [0.0] * size)
    sends = size - 1 + 2 * SEARCH_SENDS + GATHER_SENDS
    calls = size - 1 + 3 * rounds(size) - 4 * (rounds(size) - 1)
    assert found.send_seconds * sends == pytest.approx(calls * CALL_SECONDS, rel=0.01)


def test_node_with_fewer_ranks_does_not_change_the_swap_overhead(virtual):
    found = found_on(virtual, 5, 4, 5e-3, [0.0] * 5)
    assert found.swap_seconds == pytest.approx(CALL_SECONDS, rel=0.05)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_ranks_that_wake_late_do_not_increase_the_overhead(virtual, size, monkeypatch):
    """Ranks wake many latencies late, by a different time in each run."""
    world = virtual(size, Link(5e-4, 1e-9), call_seconds=CALL_SECONDS)
    here = threading.local()

    def sleep(seconds: float) -> None:
        world.seconds[here.rank] += seconds + here.random.uniform(0, 0.02)

    def program(transport) -> Rates:
        here.rank, here.random = transport.rank, random.Random(transport.rank)
        network = Network(size, world.between)
        return measure_calls(transport, network, COSTLESS, world.clock(transport.rank))

    monkeypatch.setattr(per_call_overhead, "time", SimpleNamespace(sleep=sleep))
    found, *_ = run_ranks(world.world, program)
    # They leave a barrier further apart than a latency, which has a small effect.
    assert found.swap_seconds == pytest.approx(CALL_SECONDS, rel=0.25)


def test_measured_algorithms_take_turns_until_time_is_up(virtual, monkeypatch):
    seen: list[str] = []

    def record_name(name, reduce):
        def run(selected, k, transport, **options):
            if threading.current_thread().name == "rank 0":
                seen.append(name)
            return reduce(selected, k, transport, **options)

        return run

    each = {
        name: record_name(name, reduce) for name, reduce in per_call_overhead.ALGORITHMS.items()
    }
    monkeypatch.setattr(per_call_overhead, "ALGORITHMS", each)

    def seen_at(latency: float) -> list[str]:
        world = virtual(2, Link(latency, 0.0))

        def program(transport) -> Rates:
            if transport.rank == 0:
                threading.current_thread().name = "rank 0"
            clock = world.clock(transport.rank)
            return measure_calls(transport, Network(2, WITHIN), DEFAULT_RATES, clock)

        seen.clear()
        run_ranks(world.world, program)
        return seen

    turn, split = ["gtopk", "topk-allgather"], ["oktopk"]
    assert seen_at(0.0) == 7 * turn + 8 * split  # the first is not timed
    # Turns of two latencies each, then runs of three.
    assert seen_at(CALLS_SECONDS / 8) == 4 * turn + 4 * split
    assert seen_at(CALLS_SECONDS) == turn + 2 * split


def test_single_rank_keeps_its_rates():
    (found,) = run_ranks(
        local_world(1), lambda t: measure_calls(t, Network(1, WITHIN), DEFAULT_RATES)
    )
    assert found == DEFAULT_RATES
