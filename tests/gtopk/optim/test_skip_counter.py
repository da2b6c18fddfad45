"""A skipped step is told of once for all ranks, and an error says why the last one was skipped."""

from __future__ import annotations

import pytest

from gtopk.optim.skip_counter import SkippedSteps


@pytest.mark.parametrize(
    ("where", "seen", "why"),
    [
        ("rank 3: 'w'", "the gradient is not finite on rank 3: 'w'", "a gradient is not finite on"),
        ("", "the sum of finite gradients is not finite", "a sum overflowed"),
    ],
)
def test_a_gradient_and_a_sum_are_told_apart(where, seen, why, caplog) -> None:
    skipped = SkippedSteps(0)
    with pytest.raises(FloatingPointError, match=f"skipped at step 7, the last because {why}"):
        skipped.note(1, 7, where)
    assert caplog.messages == [
        f"rank 1: step 7 is skipped on every rank, residuals untouched: {seen}"
    ]
    assert caplog.records[0].everywhere  # equal on all ranks: without GTOPK_LOG, rank 0 prints it
