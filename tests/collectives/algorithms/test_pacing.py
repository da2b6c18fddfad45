"""Two long lists are never sent to a rank at the same time; pacing changes nothing else."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise

import numpy as np
import pytest

from collectives import MessageError, SparseVector, local_world, reduce, run_ranks
from collectives.algorithms import gtopk
from collectives.algorithms.gtopk import LONG_ENTRIES
from collectives.cost import Link
from collectives.cost_model import DEFAULT_RATES, Candidate, Network, predict
from mpi_scripts.replay.traces import RECEIVED, Event, Recorder
from tests.collectives.algorithms.worlds import bits, random_picks

LENGTH = 8 * LONG_ENTRIES
SIZES = (3, 5, 6, 7, 11, 12, 13)


def record(size: int, k: int) -> tuple[list[Recorder], list[tuple[SparseVector, SparseVector]]]:
    """Run a reduction on recorders; return these and the outcomes."""
    picks = random_picks(np.random.default_rng(size), size, LENGTH, k)
    world = local_world(size, timeout_seconds=30, kind=Recorder)
    return world, run_ranks(world, lambda t: reduce(picks[t.rank], k, t))


def transfer_intervals(
    trace: list[list[Event]], latency: float
) -> dict[int, list[tuple[float, float]]]:
    """Return the intervals in which bytes are on the way to each rank; a byte takes a second."""
    now, free = [0.0] * len(trace), [0.0] * len(trace)
    flights: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    todo = [deque(events) for events in trace]
    while any(todo):
        for rank, events in enumerate(todo):
            while events:
                peer, size = events[0]
                if size == RECEIVED and not flights[peer, rank]:
                    break
                events.popleft()
                if size == RECEIVED:
                    now[rank] = max(now[rank], flights[peer, rank].popleft())
                    continue
                begun = max(now[rank], free[rank])
                free[rank] = begun + size
                flights[rank, peer].append(begun + latency + size)
                found[peer].append((begun + latency, begun + latency + size))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_long_lists_to_a_rank_do_not_overlap_in_time(size: int) -> None:
    world, _ = record(size, LONG_ENTRIES)
    latency = 1.0  # seconds; a list takes thousands. Go-aheads cost a few latencies
    for intervals in transfer_intervals(
        [transport.events for transport in world], latency
    ).values():
        lists = sorted(
            interval for interval in intervals if interval[1] - interval[0] > LONG_ENTRIES
        )
        assert all(later[0] > earlier[1] - 5 * latency for earlier, later in pairwise(lists))


@pytest.mark.parametrize("size", SIZES)
def test_go_aheads_are_as_many_as_predicted_and_do_not_change_the_result(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, outcomes = record(size, LONG_ENTRIES)
    link = Network(size, Link(1e-3, 1e-6))
    found = predict(Candidate("gtopk", LONG_ENTRIES / LENGTH), LENGTH, link, DEFAULT_RATES)
    assert found.sent.messages * size == sum(t.traffic.sent_messages for t in world)

    monkeypatch.setattr(gtopk, "LONG_ENTRIES", LENGTH)
    unpaced, unpaced_outcomes = record(size, LONG_ENTRIES)
    assert sum(t.traffic.sent_bytes for t in unpaced) == sum(t.traffic.sent_bytes for t in world)
    assert [list(map(bits, outcome)) for outcome in outcomes] == [
        list(map(bits, outcome)) for outcome in unpaced_outcomes
    ]


def test_list_sent_instead_of_a_go_ahead_is_an_error() -> None:
    picks = random_picks(np.random.default_rng(0), 3, LENGTH, LONG_ENTRIES - 1)
    world = local_world(3, timeout_seconds=30)
    with pytest.raises(MessageError, match="every rank must"):
        run_ranks(world, lambda t: reduce(picks[t.rank], LONG_ENTRIES - (t.rank != 1), t))
