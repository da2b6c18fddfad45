"""A speed model fits its samples, forgets old ones, and restarts if a rank's speed changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.throughput import Cost, SpeedModel, summarise


@settings(deadline=None)
@given(st.floats(0, 0.5), st.floats(1e-4, 1e-2), st.integers(50, 200))
def test_an_affine_cost_is_found_from_two_sizes(fixed: float, slope: float, size: int) -> None:
    true, model = Cost(fixed, slope), SpeedModel()
    for each in (size, 2 * size):
        model.observe(each, true.seconds(each))
    if model.cost.per_sample > slope * (1 + 1e-6):  # the floor of the slope
        assert slope * 1.5 * size < 0.2501 * true.seconds(1.5 * size)
    else:
        assert model.cost.seconds(3 * size) == pytest.approx(true.seconds(3 * size))


def test_one_size_is_taken_in_proportion() -> None:
    model = SpeedModel()
    for _ in range(3):
        model.observe(100, 0.5)
    assert model.cost == Cost(0.0, 0.005)


def test_an_old_window_weighs_less_than_a_new_one() -> None:
    model = SpeedModel()
    for size, seconds in ((100, 1.0), (100, 1.2), (120, 1.35)):
        model.observe(size, seconds)
    assert model.cost.seconds(100) > 1.1


def test_a_rank_that_slows_fourfold_starts_anew() -> None:
    model = SpeedModel()
    assert not model.observe(100, 1.0)
    assert not model.observe(150, 1.5)
    assert model.observe(150, 6.0)
    assert model.cost == Cost(0.0, 6.0 / 150)


def test_a_window_is_its_median_unless_the_rank_changes_within_it() -> None:
    assert summarise([1.0, 9.0, 1.1, 1.0, 0.9, 1.0]) == 1.0
    assert summarise([1.0, 1.0, 1.0, 4.0, 4.0]) == 4.0
    assert summarise([1.0, 1.0, 4.0, 4.0]) == 4.0
    assert summarise([1.0, 1.0, 1.0, 4.0]) == 1.0
    assert summarise([2.0]) == 2.0


def test_a_batch_of_nothing_says_nothing() -> None:
    model = SpeedModel()
    assert not model.observe(0, 0.0)
    assert not model.has_data
    with pytest.raises(ValueError, match="needs an observation"):
        _ = model.cost


def test_a_model_survives_a_checkpoint() -> None:
    model, other = SpeedModel(), SpeedModel()
    model.observe(100, 1.0)
    model.observe(150, 1.2)
    other.load_state_dict(model.state_dict())
    assert other.cost == model.cost
