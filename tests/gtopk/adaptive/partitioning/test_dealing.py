"""With repeated dealing, every batch is computed once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.partitioning.cuts import Passes, speeds_after, split_batches, uncomputed


@settings(deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_every_batch_is_computed_once(count: int, speeds: list[int], data: Any) -> None:
    left, seen = list(range(count)), []
    while left:
        dealt = split_batches(len(left), speeds)
        assert sorted(place for places in dealt for place in places) == list(range(len(left)))
        # At least one rank computes all it has; then the rest is dealt again.
        done = [data.draw(st.integers(min(1, len(own)), len(own))) for own in dealt]
        seen += [left[p] for own, n in zip(dealt, done, strict=True) for p in own[:n]]
        left = [left[place] for place in uncomputed(dealt, done)]
        speeds = speeds_after(done, speeds)
    assert sorted(seen) == list(range(count))


def test_batches_are_dealt_by_speed() -> None:
    assert [len(own) for own in split_batches(80, [4, 2, 1, 1])] == [40, 20, 10, 10]


def test_short_pass_leaves_speeds_unchanged() -> None:
    assert speeds_after([3, 1, 0], [5, 5, 5]) == [5, 5, 5]
    assert speeds_after([30, 10, 0], [5, 5, 5]) == [30, 10, 1]


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.data())
def test_epoch_resumed_on_another_number_of_ranks_is_computed_once(
    samples: int, size: int, before: int, after: int, data: Any
) -> None:
    def compute(passes: Passes, until: int) -> list[int]:
        seen: list[int] = []
        while passes.left and passes.number < until:
            dealt = [passes.begin_pass(rank) for rank in range(len(passes.speeds))]
            done = [data.draw(st.integers(min(1, len(own)), len(own))) for own in dealt]
            seen += [
                p for own, n in zip(dealt, done, strict=True) for part in own[:n] for p in part
            ]
            passes.close(done)
        return seen

    first, resumed = Passes(before, size), Passes(after, size)
    first.begin([range(samples)])
    seen = compute(first, until=data.draw(st.integers(0, 3)))
    resumed.load_state_dict(first.state_dict())
    assert resumed.left == first.left
    assert sorted(seen + compute(resumed, until=samples + 4)) == list(range(samples))
