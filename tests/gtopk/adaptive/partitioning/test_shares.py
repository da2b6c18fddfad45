"""Integer shares keep their sum, bounds and granularity."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.partitioning.cuts import Limits, clamp, divide, round_sizes


@st.composite
def limits_and_wishes(draw: Any) -> tuple[Limits, list[float]]:
    ranks = draw(st.integers(1, 9))
    grain = draw(st.sampled_from([1, 2, 8]))
    low = [draw(st.integers(0, 5)) * grain for _ in range(ranks)]
    high = [least + draw(st.integers(0, 20)) * grain for least in low]
    total = draw(st.integers(sum(low) // grain, sum(high) // grain)) * grain
    wishes = [draw(st.floats(0.0, 200.0)) for _ in range(ranks)]
    return Limits(total, low, high, grain), wishes


@settings(deadline=None)
@given(limits_and_wishes())
def test_rounded_sizes_stay_in_limits_and_within_a_grain_of_exact_sizes(case: Any) -> None:
    limits, wishes = case
    sizes = round_sizes(wishes, limits)
    assert sum(sizes) == limits.total
    for size, exact, low, high in zip(
        sizes, clamp(wishes, limits), limits.low, limits.high, strict=True
    ):
        assert low <= size <= high
        assert size % limits.grain == 0
        assert abs(size - exact) <= limits.grain * (1 + 1e-6)


def test_rounding_ties_favor_the_lower_rank() -> None:
    assert round_sizes([2.5, 2.5, 2.5, 2.5], Limits(10, [0] * 4, [9] * 4)) == [3, 3, 2, 2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.floats(0, 1))
def test_partial_step_is_divided_in_proportion(sizes: list[int], share: float) -> None:
    count = int(share * sum(sizes))
    parts = divide(count, sizes)
    assert sum(parts) == count
    for part, size in zip(parts, sizes, strict=True):
        assert part <= size
        assert abs(part - count * size / max(1, sum(sizes))) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(10, [0, 0], [4, 4]), "allow 0 to 8 samples a step, and the global batch is 10"),
        (Limits(10, [6, 6], [9, 9]), "allow 12 to 18 samples"),
        (Limits(10, [0, 0], [9, 9], 4), "multiple of the grain 4, got 10"),
        (Limits(8, [0, 3], [9, 2]), "got 3 and 2 on rank 1"),
        (Limits(8, [0], [9], 0), "grain must be at least 1, got 0"),
    ],
)
def test_unsatisfiable_limits_raise(limits: Limits, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        round_sizes([1.0] * len(limits.low), limits)
