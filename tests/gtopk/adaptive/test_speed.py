"""A speed model fits its samples, forgets old ones, and restarts if a rank's speed changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtopk.adaptive.throughput import Cost, SpeedModel, summarise


@settings(deadline=None)
@given(st.floats(0, 0.5), st.floats(1e-4, 1e-2), st.integers(50, 200))
def test_speed_model_finds_affine_cost_from_two_sizes(
    fixed: float, slope: float, size: int
) -> None:
    true, model = Cost(fixed, slope), SpeedModel()
    for each in (size, 2 * size):
        model.observe(each, true.seconds(each))
    if model.cost.per_sample > slope * (1 + 1e-6):  # the floor of the slope
        assert slope * 1.5 * size < 0.2501 * true.seconds(1.5 * size)
    else:
        assert model.cost.seconds(3 * size) == pytest.approx(true.seconds(3 * size))


def test_speed_model_of_one_size_is_proportional() -> None:
    model = SpeedModel()
    for _ in range(3):
        model.observe(100, 0.5)
    assert model.cost == Cost(0.0, 0.005)


def test_old_window_weighs_less_than_new_one() -> None:
    model = SpeedModel()
    for size, seconds in ((100, 1.0), (100, 1.2), (120, 1.35)):
        model.observe(size, seconds)
    assert model.cost.seconds(100) > 1.1


def test_speed_model_restarts_if_rank_slows_fourfold() -> None:
    model = SpeedModel()
    assert not model.observe(100, 1.0)
    assert not model.observe(150, 1.5)
    assert model.observe(150, 6.0)
    assert model.cost == Cost(0.0, 6.0 / 150)


def test_window_summary_is_median_unless_speed_changes_within_it() -> None:
    assert summarise([1.0, 9.0, 1.1, 1.0, 0.9, 1.0]) == 1.0
    assert summarise([1.0, 1.0, 1.0, 4.0, 4.0]) == 4.0
    assert summarise([1.0, 1.0, 4.0, 4.0]) == 4.0
    assert summarise([1.0, 1.0, 1.0, 4.0]) == 1.0
    assert summarise([2.0]) == 2.0


def test_empty_batch_is_no_observation() -> None:
    model = SpeedModel()
    assert not model.observe(0, 0.0)
    assert not model.has_data
    with pytest.raises(ValueError, match="needs an observation"):
        _ = model.cost


def test_speed_model_survives_checkpoint() -> None:
    model, other = SpeedModel(), SpeedModel()
    model.observe(100, 1.0)
    model.observe(150, 1.2)
    other.load_state_dict(model.state_dict())
    assert other.cost == model.cost
