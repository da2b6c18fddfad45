"""A residual is sent in parts half as long as the gradients, and is finally empty."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gtopk.exchange.residual import MAX_DRAIN_STEPS, Residual, drain_fraction


def sent_parts(gradient: float, held: float) -> list[float]:
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


@pytest.mark.parametrize(("held", "sent"), [(7.0, [2.0, 2.0, 2.0, 1.0]), (2.0, [2.0])])
def test_each_step_sends_at_most_half_its_gradients_length(held: float, sent: list[float]) -> None:
    assert sent_parts(4.0, held) == pytest.approx(sent)


def test_residual_without_gradients_is_sent_in_max_drain_steps() -> None:
    sent = sent_parts(0.0, 5.0)
    assert len(sent) == MAX_DRAIN_STEPS
    assert sent == pytest.approx([5.0 / MAX_DRAIN_STEPS] * MAX_DRAIN_STEPS)


def test_step_with_nonfinite_gradient_drains_nothing() -> None:
    assert drain_fraction(4.0, math.nan, 0) == drain_fraction(4.0, math.inf, 0) == 0.0


def test_draining_does_not_throw_off_a_converged_model() -> None:
    """SGD with momentum near the minimum of x^2 / 2, with a residual of a hundred old gradients."""

    def farthest(in_parts: bool) -> float:
        residual = Residual(1, np.dtype(np.float64))
        residual.values[0], residual.is_empty = 10.0, False
        x, velocity, most = 0.1, 0.0, 0.0
        for _ in range(400):
            total = np.array([x])
            if in_parts:
                residual.subtract_fraction(residual.add_fraction_to(total))
            else:
                total += residual.values
                residual.clear()
            velocity = 0.9 * velocity + total[0]
            x -= 0.05 * velocity
            most = max(most, abs(x))
        return most

    assert farthest(in_parts=False) > 1.5
    assert farthest(in_parts=True) < 0.15
