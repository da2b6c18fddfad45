"""A step is taken with gradients that are finite, and with no others."""

from __future__ import annotations

import math

import torch

from gtopk.adaptive.hogbatch.skipped_updates import all_finite


def test_large_gradients_in_16_bits_are_finite() -> None:
    gradients = [torch.full(shape, 60_000.0, dtype=torch.float16) for shape in ((16, 8), (16,))]
    assert all_finite(gradients)
    gradients[-1][0] = math.inf
    assert not all_finite(gradients)
    assert all_finite([])
