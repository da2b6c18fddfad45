"""Learning-rate schedules: warm-up, milestones, decay, and the documented curves."""

from __future__ import annotations

import pytest

from mpi_scripts.training.schedules import Progress, constant, cosine, decaying, stepwise


def test_stepwise_schedule_warms_up_and_falls_at_milestones() -> None:
    schedule = stepwise(81, 122, warmup_epochs=10)
    factors = [schedule(Progress(epoch, 141, 4)) for epoch in (0, 5, 9.99, 10, 80.9, 81, 122, 140)]
    assert factors == pytest.approx([0.25, 0.625, 0.99925, 1, 1, 0.1, 0.01, 0.01])
    assert schedule(Progress(0, 141, 1)) == 1, "one rank has no warm-up"


def test_decaying_schedule_divides_the_rate_after_every_epoch() -> None:
    schedule = decaying(1.01)
    assert [schedule(Progress(epoch, 9, 4)) for epoch in (0, 0.9, 1, 2.5)] == pytest.approx(
        [1, 1, 1 / 1.01, 1 / 1.01**2]
    )


def test_cosine_schedule_warms_up_linearly_and_ends_at_zero() -> None:
    schedule = cosine(warmup_epochs=1)
    factors = [schedule(Progress(epoch, 9, 4)) for epoch in (0, 0.5, 1, 5, 9)]
    assert factors == pytest.approx([0, 0.5, 1, 0.5, 0])
    falling = [schedule(Progress(1 + number / 10, 9, 4)) for number in range(80)]
    assert falling == sorted(falling, reverse=True)
    assert schedule(Progress(0.5, 1, 4)) == 0.5, "a run no longer than the warm-up only rises"


def test_constant_schedule_keeps_the_learning_rate() -> None:
    assert {constant(Progress(epoch, 9, 4)) for epoch in range(9)} == {1.0}
