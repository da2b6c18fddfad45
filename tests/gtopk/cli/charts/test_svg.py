"""Axes: positions of values, and ticks."""

import numpy as np
import pytest

from gtopk.cli.charts import LEFT, RIGHT, horizontal, vertical


def test_axes_run_from_edge_to_edge() -> None:
    axis = horizontal(1e7, 1e11, logarithmic=True)
    assert [axis.place(value) for value in (1e7, 1e9, 1e11)] == pytest.approx(
        [LEFT, (LEFT + RIGHT) / 2, RIGHT]
    )
    assert axis.ticks() == pytest.approx([1e7, 1e8, 1e9, 1e10, 1e11])


def test_ticks_are_round_numbers_inside_the_axis() -> None:
    assert vertical(0.85, 1.0).ticks() == pytest.approx([0.85, 0.9, 0.95, 1.0])
    assert horizontal(1, 30).ticks() == pytest.approx([10, 20, 30])
    assert horizontal(3e5, 6e6, logarithmic=True).ticks() == pytest.approx([5e5, 1e6, 2e6, 5e6])
    assert horizontal(1, 1).ticks() == pytest.approx([0.6, 0.8, 1, 1.2, 1.4])


@pytest.mark.parametrize("value", [0.0, -3.0, 2.1e16, -1e300])
def test_single_value_lies_in_the_middle_of_its_axis(value: float) -> None:
    axis = horizontal(value, value)
    assert axis.place(value) == pytest.approx((LEFT + RIGHT) / 2)
    assert 2 <= len(axis.ticks()) <= 6


def test_linear_axis_has_two_to_six_ticks() -> None:
    random = np.random.default_rng(0)
    for _ in range(1000):
        low = random.uniform(0, 10)
        ticks = horizontal(low, low + 10 ** random.uniform(-3, 3)).ticks()
        assert 2 <= len(ticks) <= 6
