"""The lag is the mean residual of steady gradients, in steps."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.cost_model import Training, lag_steps


@pytest.mark.parametrize("updated", [4, 20, 100])
def test_lag_steps_equals_the_mean_residual_of_steady_gradients(updated):
    """Error feedback on constant gradients: most have equal size, a few are ten times larger."""
    length = 1000
    gradient = np.random.default_rng(5).uniform(0.9, 1.1, length)
    gradient[: updated // 4] *= 10
    residual, held = np.zeros(length), []
    for _ in range(20 * length // updated):
        residual += gradient
        sent = np.argpartition(residual, -updated)[-updated:]
        residual[sent] = 0.0
        held.append(residual.sum() / gradient.sum())
    late = held[len(held) // 2 :]
    assert np.mean(late) == pytest.approx(lag_steps(length, updated), rel=0.25)


def test_updating_every_element_has_no_lag():
    assert lag_steps(7, 7) == 0.0


def test_lag_costs_whole_steps_divided_by_the_length_of_training():
    assert Training(100, elsewhere_seconds=2.0).cost(1.0, 50.0) == 1.0 + 0.5 * 3.0
    assert Training(100, elsewhere_seconds=2.0, share=0.1).cost(1.0, 50.0) == 1.0 + 0.05 * 3.0
    assert Training().cost(1.0, 50.0) == 1.0


def test_hidden_reduction_costs_only_its_lag():
    assert Training(100, 2.0, room_seconds=0.75).cost(1.0, 50.0) == 0.25 + 0.5 * 2.25
    assert Training(100, 2.0, room_seconds=3.0).cost(1.0, 50.0) == 0.5 * 2.0
    assert Training(100, 2.0, room_seconds=3.0).cost(1.0, 0.0) == 0.0
