"""The compression choices refuse unsupported options."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from gtopk.compression import Compression, Compressor, selected

SPARSE = [
    Compression.topk,
    Compression.gtopk,
    Compression.oktopk,
    Compression.hierarchical,
    Compression.auto,
]


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("density", [0, -0.1, 1.0001, float("nan"), float("inf")])
def test_density_outside_0_to_1_raises_with_its_value(kind, density):
    with pytest.raises(ValueError, match=rf"density must lie in \(0, 1\], got {density}"):
        kind(density=density)


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("density", ["0.1", True])
def test_density_that_is_no_number_raises(kind, density):
    with pytest.raises(TypeError, match="density must be a number"):
        kind(density=density)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_momentum_correction_outside_0_to_1_raises(momentum):
    with pytest.raises(ValueError, match="momentum_correction must lie in"):
        Compression.gtopk(0.1, momentum_correction=momentum)


@pytest.mark.parametrize("kind", SPARSE)
def test_factor_masking_is_a_boolean_and_requires_momentum_correction(kind):
    assert not kind(density=0.1).factor_masking
    masked = kind(density=0.1, momentum_correction=0.9, factor_masking=True)
    assert "factor_masking=True" in masked.signature()
    with pytest.raises(ValueError, match=r"factor_masking=True .* requires momentum_correction"):
        kind(density=0.1, factor_masking=True)
    with pytest.raises(TypeError, match=r"factor_masking must be True or False, got 0\.9"):
        kind(density=0.1, factor_masking=0.9)


@pytest.mark.parametrize(
    ("density", "length", "k"), [(0.001, 25_557_032, 25557), (1.0, 7, 7), (0.001, 10, 1)]
)
def test_k_is_density_times_length_and_at_least_1(density, length, k):
    assert selected(density, length) == k


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("options", [{"wire": "zip"}, {"values": "int5"}])
def test_unknown_wire_or_values_format_raises_with_the_known_ones(kind, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} must be one of .*auto; got '{value}'"):
        kind(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Compression.gtopk(growth=0.5), "growth must be a number from 1 on, got 0.5"),
        (lambda: Compression.gtopk(growth="2"), "growth must be a number, got '2'"),
        (lambda: Compression.oktopk(k_out=float("nan")), "k_out must be a number from 1 on"),
        (lambda: Compression.hierarchical(across="topk"), "across must be one of gtopk, oktopk"),
        (lambda: Compression.hierarchical(node_size=0), "node_size must be at least 1, got 0"),
        (
            lambda: Compression.auto(density=0.1, bytes_per_step=1e6),
            "give one budget, not several: density=0.1, bytes_per_step=1000000.0",
        ),
        (
            lambda: Compression.auto(bytes_per_step=1e6, hide_behind_backward=True),
            "give one budget, not several",
        ),
        (lambda: Compression.gtopk(dense=["("]), r"dense takes regular expressions, got '\('"),
        (lambda: Compression.gtopk(dense=[1]), "dense takes regular expressions, got 1"),
        (lambda: Compression.auto(bytes_per_step=0), "bytes_per_step must be above 0"),
        (lambda: Compression.auto(bytes_per_step="1M"), "bytes_per_step must be a number"),
        (lambda: Compression.auto(hide_behind_backward=1), "must be True or False, got 1"),
    ],
)
def test_invalid_option_raises_with_its_value(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_auto_without_a_budget_has_density_0_001_and_at_least_1000_entries():
    assert Compression.auto().density_of(25_557_032) == 0.001
    assert Compression.auto().density_of(285_000) == pytest.approx(1000 / 285_000)
    assert Compression.auto().density_of(10) == 1.0
    assert Compression.auto(density=0.002).density_of(10) == 0.002
    assert Compression.auto(bytes_per_step=1e6).density_of(10) is None
    assert Compression.auto(bytes_per_step=1e6).density is None


def test_signature_contains_every_option():
    signature = Compression.gtopk(0.5, momentum_correction=0.9).signature()
    assert signature == (
        "gtopk density=0.5 momentum_correction=0.9 factor_masking=False "
        "adam_correction=None dense=() dense_vectors=False dense_under=0 wire=blocks "
        "values=exact warmup_steps=0 warmup_from=0.25 growth=2.0"
    )
    assert Compression.auto(hide_behind_backward=True).signature() == (
        "auto momentum_correction=0.0 factor_masking=False adam_correction=None dense=() "
        "dense_vectors=False dense_under=0 wire=auto values=auto density=None bytes_per_step=None "
        "hide_behind_backward=True steps=10000"
    )


def test_wire_auto_offers_all_index_formats():
    formats = Compression.gtopk(wire="auto", values="bf16").formats()
    assert [format.indices for format in formats] == ["raw", "blocks", "packed"]
    assert {format.values for format in formats} == {"bf16"}


def test_values_auto_offers_no_format_below_8_bits():
    for compression in (Compression.gtopk(values="auto"), Compression.auto()):
        values = {format.values for format in compression.formats()}
        assert values == {"exact", "bf16", "fp16", "int8"}
    (given,) = Compression.auto(wire="packed", values="int3").formats()
    assert given == ("packed", "int3")


@pytest.mark.parametrize(
    ("compressor", "dtype"),
    [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)],
)
def test_16_bit_compressors_keep_integers_and_restore_the_dtype(compressor, dtype):
    for tensor in (torch.tensor([1.5, -2.0]), torch.tensor([0.5]).double(), torch.tensor([1, 2])):
        compressed, context = compressor.compress(tensor)
        assert compressed.dtype == (dtype if tensor.is_floating_point() else tensor.dtype)
        restored = compressor.decompress(compressed, context)
        assert restored.dtype == tensor.dtype
        assert torch.equal(restored, tensor)


def test_compressor_without_compress_raises():
    with pytest.raises(TypeError, match="compress of this Compressor is not defined"):
        Compressor.compress(torch.zeros(1))


def test_warm_up_divides_the_density_by_a_constant_factor_per_step():
    compression = Compression.gtopk(0.001, warmup_steps=4, warmup_from=0.1)
    densities = [compression.density_at(step) for step in range(6)]
    assert densities[0] == pytest.approx(0.1)
    assert densities[4:] == [0.001, 0.001]
    ratios = [later / earlier for earlier, later in pairwise(densities[:5])]
    assert ratios == pytest.approx([ratios[0]] * 4)


def test_density_above_warmup_from_is_constant():
    compression = Compression.gtopk(0.5, warmup_steps=4, warmup_from=0.1)
    assert compression.density_at(0) == 0.5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"dense_vectors": True}, ["bias", "norm.weight"]),
        ({"dense_under": 10}, ["bias", "small.weight"]),
        ({"dense": "norm"}, ["norm.weight"]),
        ({"dense": ("^bias$", "large")}, ["bias", "large.weight"]),
    ],
)
def test_dense_rules_select_the_uncompressed_parameters(options, expected):
    shapes = {
        "bias": (4,),
        "norm.weight": (16,),
        "small.weight": (3, 3),
        "large.weight": (40, 40),
    }
    compression = Compression.gtopk(0.1, **options)
    dense_names = [
        name for name, shape in shapes.items() if compression.is_dense(name, torch.ones(shape))
    ]
    assert dense_names == expected


@pytest.mark.parametrize(
    "options",
    [{"warmup_steps": -1}, {"warmup_from": 0.0}, {"dense_under": -1}, {"warmup_steps": 2.5}],
)
def test_invalid_warmup_or_dense_under_raises(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        Compression.gtopk(0.1, **options)


def test_growth_between_nodes_applies_to_gtopk_only():
    assert Compression.hierarchical(0.1, growth=4.0).widening() == 4.0
    assert Compression.hierarchical(0.1, across="oktopk").widening() == 1.0
    with pytest.raises(ValueError, match="growth requires across='gtopk', got across='oktopk'"):
        Compression.hierarchical(0.1, across="oktopk", growth=4.0)
