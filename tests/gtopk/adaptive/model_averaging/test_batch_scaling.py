"""Batch sizes converge to equal numbers of updates on all ranks, and stay within bounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.model_averaging.options import RULES, multiplicative, published_rule
from gtopk.adaptive.partitioning.cuts import Limits

MOST = 1024
counts = st.integers(2, 6).flatmap(
    lambda ranks: st.tuples(
        st.lists(st.integers(128, MOST), min_size=ranks, max_size=ranks),
        st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks),
    )
)


def limits(ranks: int, least: int = MOST // 8, grain: int = 1) -> Limits:
    return Limits(0, [least] * ranks, [MOST] * ranks, grain)


def updates_of(sizes: Sequence[int], speeds: Sequence[float], samples: int) -> list[int]:
    """Return the number of updates of each rank until all shared samples are taken."""
    seconds = samples / sum(speeds)
    return [int(seconds * speed / size) for size, speed in zip(sizes, speeds, strict=True)]


@settings(deadline=None)
@given(counts, st.sampled_from(["multiplicative", "published", "none"]), st.sampled_from([1, 8]))
def test_sizes_respect_bounds_and_grain(
    case: tuple[list[int], list[int]], rule: str, grain: int
) -> None:
    sizes, updates = case
    sizes = [size // grain * grain for size in sizes]
    bounds = limits(len(sizes), grain=grain)
    following = RULES[rule](sizes, updates, bounds)
    assert len(following) == len(sizes)
    assert all(128 <= size <= MOST and size % grain == 0 for size in following)


@pytest.mark.parametrize("speeds", [[132, 120, 110, 100], [4, 2, 1, 1], [8, 1], [3, 1, 2]])
def test_multiplicative_rule_converges_in_one_round(speeds: list[float]) -> None:
    sizes = [MOST] * len(speeds)
    sizes = multiplicative(sizes, updates_of(sizes, speeds, 100 * MOST), limits(len(speeds)))
    after = updates_of(sizes, speeds, 100 * MOST)
    assert max(after) <= 1.1 * min(after)
    assert max(sizes) == MOST
    assert multiplicative(sizes, after, limits(len(speeds))) == sizes or max(after) > min(after) + 1


def test_published_rule_oscillates_if_its_gain_exceeds_two() -> None:
    speeds = [4.0, 2.0, 1.0, 1.0]
    sizes, ratios = [MOST] * 4, []
    for _ in range(40):
        updates = updates_of(sizes, speeds, 100 * MOST)
        ratios.append(max(updates) / min(updates))
        sizes = published_rule(sizes, updates, limits(4))
    assert min(ratios[20:]) > 1.15


def test_published_rule_moves_by_half_the_lower_bound_per_update_off_the_mean() -> None:
    bounds = Limits(0, [128] * 3, [1024] * 3)
    assert published_rule([512] * 3, [12, 10, 8], bounds) == [640, 512, 384]
    assert published_rule([512, 512, 900], [10, 8, 12], bounds) == [
        512,
        384,
        900,
    ]  # at its bound, so unchanged


def test_multiplicative_rule_ignores_a_difference_of_one_update() -> None:
    assert multiplicative([100, 300], [7, 8], limits(2, 1)) == [100, 300]
    assert multiplicative([100, 300], [6, 8], limits(2, 1)) == [256, 1024]


def test_rank_without_updates_gets_smallest_batch() -> None:
    assert multiplicative([512, 512], [0, 20], limits(2)) == [128, 1024]
