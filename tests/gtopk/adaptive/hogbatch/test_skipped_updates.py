"""Only finite gradients lead to a step."""

from __future__ import annotations

import math

import pytest
import torch

from gtopk.adaptive.hogbatch.workers_batch import SkippedUpdates


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
