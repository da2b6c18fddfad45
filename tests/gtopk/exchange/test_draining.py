"""A residual is sent in parts half as long as the gradients, and is finally empty."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gtopk.exchange.residual import MAX_DRAIN_STEPS, Residual, drain_fraction


def drained(gradient: float, held: float) -> list[float]:
    """Return the part of a residual that each dense step sends with gradients of this length."""
    residual = Residual(3, np.dtype(np.float64))
    residual.values[1] = held
    residual.is_empty = False
    sent = []
    while not residual.is_empty:
        total = np.array([gradient, 0.0, 0.0])
        before = residual.values[1]
        residual.subtract_fraction(residual.add_fraction_to(total))
        sent.append(float(total[1]))
        assert total[1] + residual.values[1] == pytest.approx(before, rel=1e-15)
    return sent


def test_a_step_sends_half_as_much_as_its_gradient_is_long() -> None:
    assert drained(4.0, 7.0) == pytest.approx([2.0, 2.0, 2.0, 1.0])


def test_what_is_no_longer_than_that_goes_at_once() -> None:
    assert drained(4.0, 2.0) == [2.0]


def test_beside_no_gradients_it_is_gone_after_so_many_steps() -> None:
    sent = drained(0.0, 5.0)
    assert len(sent) == MAX_DRAIN_STEPS
    assert sent == pytest.approx([5.0 / MAX_DRAIN_STEPS] * MAX_DRAIN_STEPS)


def test_a_step_that_will_not_count_sends_nothing_of_it() -> None:
    assert drain_fraction(4.0, math.nan, 0) == drain_fraction(4.0, math.inf, 0) == 0.0


def test_a_model_at_rest_is_not_thrown_off() -> None:
    """SGD with momentum near the minimum of x^2 / 2, with a residual of a hundred old gradients."""

    def farthest(shares: bool) -> float:
        residual = Residual(1, np.dtype(np.float64))
        residual.values[0], residual.is_empty = 10.0, False
        x, velocity, most = 0.1, 0.0, 0.0
        for _ in range(400):
            total = np.array([x])
            if shares:
                residual.subtract_fraction(residual.add_fraction_to(total))
            else:
                total += residual.values
                residual.clear()
            velocity = 0.9 * velocity + total[0]
            x -= 0.05 * velocity
            most = max(most, abs(x))
        return most

    assert farthest(shares=False) > 1.5
    assert farthest(shares=True) < 0.15
