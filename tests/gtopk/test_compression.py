"""The compression choices refuse what they cannot do."""

from __future__ import annotations

import pytest
import torch

from gtopk.compression import Compression, Compressor

SPARSE = [Compression.topk, Compression.gtopk]


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("density", [0, -0.1, 1.0001, float("nan"), float("inf")])
def test_a_density_outside_0_to_1_is_refused_with_its_value(kind, density):
    with pytest.raises(ValueError, match=rf"density must lie in \(0, 1\], got {density}"):
        kind(density=density)


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("density", ["0.1", None, True])
def test_a_density_must_be_a_number(kind, density):
    with pytest.raises(TypeError, match="density must be a number"):
        kind(density=density)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_momentum_that_diverges_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum_correction must lie in"):
        Compression.gtopk(0.1, momentum_correction=momentum)


@pytest.mark.parametrize(
    ("density", "length", "k"), [(0.001, 25_557_032, 25557), (1.0, 7, 7), (0.001, 10, 1)]
)
def test_k_is_the_share_of_the_length_but_never_0(density, length, k):
    assert Compression.gtopk(density).selected(length) == k


def test_fp16_leaves_integers_alone_and_restores_the_dtype():
    for tensor in (torch.tensor([1.5, -2.0]), torch.tensor([1, 2])):
        compressed, context = Compression.fp16.compress(tensor)
        assert compressed.dtype == (torch.float16 if tensor.is_floating_point() else tensor.dtype)
        restored = Compression.fp16.decompress(compressed, context)
        assert restored.dtype == tensor.dtype
        assert torch.equal(restored, tensor)


def test_an_unfinished_compressor_says_so():
    with pytest.raises(TypeError, match="compress of this Compressor is not defined"):
        Compressor.compress(torch.zeros(1))
