"""The cursor hands out every sample once, in any order of the ranks, and knows the lost ones."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.transports import LocalTransport, local_world, run_ranks
from collectives.transports.counters import LocalCounter
from gtopk.adaptive.partitioning.cursor import (
    ReplayedCursor,
    SampleRange,
    SharedCursor,
    by_speed,
    open_cursor,
    record_of,
    recorded,
)

ranges = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: range(pair[0], sum(pair))),
    max_size=5,
)


def positions(takes: list[range]) -> list[int]:
    return list(chain.from_iterable(takes))


@settings(deadline=None)
@given(ranges, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=60))
def test_takes_cover_the_stretch_once(places: list[range], turns: list[tuple[int, int]]) -> None:
    stretch, counter = SampleRange(places), LocalCounter()
    cursors = [SharedCursor(counter) for _ in range(4)]
    for number in range(2):  # takes beyond the end of the first move the start of the second
        count = max(cursor.count for cursor in cursors)
        for cursor in cursors:
            cursor.open(number, len(stretch), [1] * 4, count)
        takes = [cursors[rank].take(samples) for rank, samples in turns]
        while take := cursors[0].take(7):
            takes.append(take)
        assert positions(takes) == list(range(len(stretch)))
        handed_out = [place for take in takes for place in positions(stretch.places(take))]
        assert handed_out == positions(places)


@settings(deadline=None)
@given(ranges, st.sets(st.integers(0, 99)))
def test_remaining_samples_are_those_not_finished(places: list[range], done: set[int]) -> None:
    stretch = SampleRange(places)
    finished = [range(p, p + 1) for p in sorted(done) if p < len(stretch)]
    left = [place for p, place in enumerate(positions(places)) if p not in done]
    assert positions(stretch.remaining(reversed(finished))) == left


def test_concurrent_takes_cover_every_sample_once() -> None:
    def rank(transport: LocalTransport) -> list[range]:
        cursor = SharedCursor(transport.counter())
        cursor.open(0, 1000, [3, 5, 2], 0)
        takes = []
        while take := cursor.take(2 + transport.rank):
            takes.append(take)
        return takes

    taken = run_ranks(local_world(3), rank)
    assert sorted(positions(list(chain.from_iterable(taken)))) == list(range(1000))


def test_replayed_record_repeats_every_take() -> None:
    sizes, total = [4, 2, 1], 23
    takes = by_speed([3.0, 2.0, 1.0])(0, total, sizes)
    assert sorted(positions(list(chain.from_iterable(takes)))) == list(range(total))
    record = [record_of(takes)]
    for rank, expected in enumerate(takes):
        cursor = open_cursor(rank, None, record)
        cursor.open(0, total, sizes, count=99)
        assert [cursor.take(sizes[rank]) for _ in expected] == expected
        assert not cursor.take(sizes[rank])


def test_by_speed_gives_faster_ranks_more_samples() -> None:
    takes = by_speed([4.0, 2.0, 1.0, 1.0])(0, 800, [10, 10, 10, 10])
    assert [sum(map(len, each)) for each in takes] == [400, 200, 100, 100]


def test_replay_that_does_not_fit_raises() -> None:
    replay = recorded([[[[0, 4]], [[4, 6]]]])
    cursor = ReplayedCursor(0, replay)
    with pytest.raises(
        ValueError, match="must cover its 7 samples, each once; they cover the first 6"
    ):
        cursor.open(0, 7, [4, 4], 0)
    with pytest.raises(ValueError, match="must be of 3 ranks, got one of 2"):
        cursor.open(0, 6, [4, 4, 4], 0)
    with pytest.raises(ValueError, match="ends after 1 stretches"):
        cursor.open(1, 6, [4, 4], 0)
    cursor.open(0, 6, [4, 4], 0)
    with pytest.raises(ValueError, match=r"rank 0 a take of 4 samples in stretch 0.*size is 2"):
        cursor.take(2)
