"""Every policy keeps to the limits; equal finish is the best there is."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.partitioning.cuts import Limits
from gtopk.adaptive.throughput.policies import POLICIES, Cost, Measured, equal_finish, spread_of


def measured(sizes: list[int], costs: list[Cost]) -> Measured:
    seconds = [c.seconds(b) if b else 0.0 for c, b in zip(costs, sizes, strict=True)]
    return Measured(sizes, seconds, costs)


@st.composite
def clusters(draw: Any, ranks: st.SearchStrategy[int]) -> tuple[Limits, list[Cost]]:
    count, grain = draw(ranks), draw(st.sampled_from([1, 4]))
    low = [draw(st.integers(0, 2)) * grain for _ in range(count)]
    high = [least + draw(st.integers(1, 8)) * grain for least in low]
    total = draw(st.integers(max(1, sum(low) // grain), sum(high) // grain)) * grain
    costs = [Cost(draw(st.floats(0, 5)), draw(st.floats(0.01, 2))) for _ in range(count)]
    return Limits(total, low, high, grain), costs


@settings(deadline=None)
@given(clusters(st.integers(1, 6)), st.sampled_from(sorted(POLICIES)), st.data())
def test_sizes_keep_to_the_limits(case: Any, name: str, data: Any) -> None:
    limits, costs = case
    wish = [data.draw(st.integers(a, b)) for a, b in zip(limits.low, limits.high, strict=True)]
    if not any(wish):
        wish[0] = limits.high[0]
    sizes = POLICIES[name](measured(wish, costs), limits)
    assert sum(sizes) == limits.total
    assert all(a <= b <= c for a, b, c in zip(limits.low, sizes, limits.high, strict=True))
    assert all(size % limits.grain == 0 for size in sizes)


@settings(deadline=None)
@given(clusters(st.integers(2, 3)))
def test_no_other_sizes_end_sooner_than_equal_finish(case: Any) -> None:
    limits, costs = case

    def ends(sizes: Any) -> float:
        return max(cost.seconds(size) for cost, size in zip(costs, sizes, strict=True))

    possible = product(
        *(range(a, b + 1, limits.grain) for a, b in zip(limits.low, limits.high, strict=True))
    )
    best = min(ends(sizes) for sizes in possible if sum(sizes) == limits.total)
    assert ends(equal_finish(measured(list(limits.high), costs), limits)) <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equal_ranks_keep_equal_sizes(name: str) -> None:
    limits = Limits(256, [8] * 4, [256] * 4)
    sizes = POLICIES[name](measured([64] * 4, [Cost(0.01, 0.001)] * 4), limits)
    assert sizes == [64] * 4


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_speeds_of_4_2_1_1_are_found_by_every_policy(name: str) -> None:
    limits, sizes = Limits(256, [8] * 4, [256] * 4), [64] * 4
    costs = [Cost(0.0, 1 / speed) for speed in (400, 200, 100, 100)]
    for _ in range(12):
        sizes = POLICIES[name](measured(sizes, costs), limits)
    assert max(c.seconds(b) for c, b in zip(costs, sizes, strict=True)) < 1.25 * 256 / 800


def test_the_spread_counts_only_ranks_that_had_samples() -> None:
    assert spread_of([1.0, 0.0, 1.5]) == pytest.approx(0.4)
    assert spread_of([1.0, 0.0]) == 0.0
