"""The factor that a rank's gradients are first multiplied with."""

from __future__ import annotations

import math

import pytest
import torch

from collectives.kernels import reference
from gtopk.optim.samples import LocalClip, agreed_norm, norm_of


def test_local_clip_scales_the_gradient_to_its_share_of_the_norm():
    gradients = torch.tensor([3.0, 0.0]), None, torch.tensor([0.0, 4.0])
    clip = LocalClip(gradients, 5.0)
    assert clip.factor(weight=1.0, share=1.0) == 1.0
    assert clip.factor(weight=1.0, share=1 / 4) == 0.5
    assert clip.factor(weight=1 / 4, share=1 / 4) == 1.0
    assert LocalClip(gradients, 1.25).factor(weight=1 / 4, share=1 / 4) == 0.5
    assert LocalClip(gradients, 5.0, scale=2.0).factor(weight=1.0, share=1 / 4) == 1.0
    assert LocalClip(gradients, None).factor(weight=1.0, share=1 / 4) == 1.0


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_local_clip_leaves_zero_nonfinite_and_missing_gradients(value):
    clip = LocalClip([torch.full((2,), value)], 0.1)
    assert [clip.factor(weight, 1 / 2) for weight in (0.0, 1.0)] == [1.0, 1.0]
    assert LocalClip([None], 0.1).factor(1.0, 1 / 2) == 1.0
    assert LocalClip([], 0.1).factor(1.0, 1 / 2) == 1.0


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 300.0), (torch.bfloat16, 300.0), (torch.float32, 1e30)],
)
def test_norm_may_exceed_the_range_of_the_gradients_dtype(dtype, value):
    gradient = torch.full((10_000,), value, dtype=dtype)
    norm = 100 * float(gradient[0])
    assert norm_of([gradient]) == pytest.approx(norm, rel=1e-3)
    assert LocalClip([gradient], 1.0).factor(1.0, 1.0) == pytest.approx(1 / norm, rel=1e-3)


def test_norm_adds_duplicate_entries_of_a_sparse_gradient():
    sparse = torch.sparse_coo_tensor([[1, 1, 4]], [1.0, 2.0, 4.0], (9,), check_invariants=True)
    assert norm_of([sparse, torch.zeros(0), torch.tensor(12.0)]) == 13.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_agreed_norm_is_summed_in_the_kernels_order(dtype):
    random = torch.Generator().manual_seed(5)
    first = torch.randn(3, 40_000, generator=random).to(dtype).t()
    sparse = torch.sparse_coo_tensor(
        [[1, 1, 4]], [1.0, 2.0, 4.0], (9,), dtype=dtype, check_invariants=True
    )
    norm = agreed_norm([first, sparse, torch.zeros(0)])
    wide = first.reshape(-1).to(torch.promote_types(dtype, torch.float32)).numpy()
    assert norm == math.sqrt(reference.squared_norm(wide) + 25.0)
    assert norm == pytest.approx(norm_of([first, sparse]), rel=1e-5)
