"""Only finite gradients lead to a step."""

from __future__ import annotations

import math

import pytest
import torch

from gtopk.adaptive.hogbatch.workers_batch import SkippedUpdates, all_finite

LARGE = {
    torch.float16: 60_000.0,
    torch.bfloat16: 3e38,
    torch.float32: 3e38,
    torch.float64: 1e308,
}


@pytest.mark.parametrize("dtype", LARGE, ids=str)
def test_large_finite_gradients_count_as_finite(dtype: torch.dtype) -> None:
    """Regression: the check used sums, and a sum of finite elements may overflow."""
    gradients = [torch.full(shape, LARGE[dtype], dtype=dtype) for shape in ((16, 8), (16,), ())]
    assert all_finite([*gradients, gradients[0].t(), gradients[0].to_sparse()])
    for spoilt in gradients:
        for value in (math.inf, -math.inf, math.nan):
            before = spoilt.clone()
            spoilt.view(-1)[-1] = value
            assert not all_finite(gradients)
            spoilt.copy_(before)
    gradients[0][3, 4] = math.nan
    assert not all_finite([gradients[0].t()])
    assert not all_finite([gradients[0].to_sparse()])
    assert all_finite([])


def test_too_many_skipped_updates_in_a_row_or_nonfinite_model_raise() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.nan, 0])
    other = torch.nn.Parameter(torch.zeros(2))
    names = {other: "b", parameter: "a"}
    skipped = SkippedUpdates(4)
    for number in range(8):
        skipped.note(7, [other, parameter], names)
        if number == 3:
            skipped.end_row()
    with pytest.raises(FloatingPointError, match=r"rank 7: 5 updates .* gradient of 'a' is not"):
        skipped.note(7, [other, parameter], names)
    other.data.fill_(-math.inf)
    with pytest.raises(FloatingPointError, match=r"rank 7: .* no longer finite, in 'b'"):
        skipped.note(7, [other, parameter], names)
    assert skipped.count == 10
