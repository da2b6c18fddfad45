"""Equal-finish sizes respect the limits, and no other sizes end sooner."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.partitioning.cuts import Limits
from gtopk.adaptive.throughput import Cost, equal_finish, spread_of


@st.composite
def clusters(draw: Any, ranks: st.SearchStrategy[int]) -> tuple[Limits, list[Cost]]:
    count, grain = draw(ranks), draw(st.sampled_from([1, 4]))
    low = [draw(st.integers(0, 2)) * grain for _ in range(count)]
    high = [least + draw(st.integers(1, 8)) * grain for least in low]
    total = draw(st.integers(max(1, sum(low) // grain), sum(high) // grain)) * grain
    costs = [Cost(draw(st.floats(0, 5)), draw(st.floats(0.01, 2))) for _ in range(count)]
    return Limits(total, low, high, grain), costs


@settings(deadline=None)
@given(clusters(st.integers(1, 6)))
def test_equal_finish_sizes_respect_the_limits(case: Any) -> None:
    limits, costs = case
    sizes = equal_finish(costs, limits)
    assert sum(sizes) == limits.total
    assert all(a <= b <= c for a, b, c in zip(limits.low, sizes, limits.high, strict=True))
    assert all(size % limits.grain == 0 for size in sizes)


@settings(deadline=None)
@given(clusters(st.integers(2, 3)))
def test_no_other_sizes_finish_sooner_than_equal_finish(case: Any) -> None:
    limits, costs = case

    def ends(sizes: Any) -> float:
        return max(cost.seconds(size) for cost, size in zip(costs, sizes, strict=True))

    possible = product(
        *(range(a, b + 1, limits.grain) for a, b in zip(limits.low, limits.high, strict=True))
    )
    best = min(ends(sizes) for sizes in possible if sum(sizes) == limits.total)
    assert ends(equal_finish(costs, limits)) <= best * (1 + 1e-9)


def test_equal_ranks_get_equal_sizes() -> None:
    limits = Limits(256, [8] * 4, [256] * 4)
    assert equal_finish([Cost(0.01, 0.001)] * 4, limits) == [64] * 4


def test_speeds_of_4_2_1_1_get_sizes_of_4_2_1_1() -> None:
    costs = [Cost(0.0, 1 / speed) for speed in (400, 200, 100, 100)]
    assert equal_finish(costs, Limits(256, [8] * 4, [256] * 4)) == [128, 64, 32, 32]


def test_spread_counts_only_ranks_with_samples() -> None:
    assert spread_of([1.0, 0.0, 1.5]) == pytest.approx(0.4)
    assert spread_of([1.0, 0.0]) == 0.0
