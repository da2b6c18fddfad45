"""Format: names and numbers of codes; index codes near the entropy bound, and edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from collectives.vector import SparseVector, index_dtype
from collectives.wire import (
    EXACT,
    HEADER_BYTES,
    INDEX_CODES,
    VALUE_CODES,
    WHOLE,
    Format,
    check_format,
    decode,
    encode,
)
from collectives.wire.format import ALL_INDEX_CODES, IndexCode, numbered, numbers

every_code = pytest.mark.parametrize("name", INDEX_CODES)


def size_bytes(code: IndexCode, indices: np.ndarray, length: int) -> int:
    """Return what the indices take, after having read them back."""
    out = np.empty(code.capacity(indices.size, length), np.uint8)
    used = code.pack(indices.astype(index_dtype(length)), length, out)
    found, taken = code.unpack(out[:used], indices.size, length)
    assert found.tolist() == indices.tolist()
    assert taken == used
    return used


def uniform(count: int, length: int) -> np.ndarray:
    random = np.random.default_rng(count)
    return np.sort(random.choice(length, count, replace=False))


def bound_bits(density: float) -> float:
    """Return log2(e / density), bits an index of uniform positions takes at least, nearly."""
    return math.log2(math.e / density)


@pytest.mark.parametrize("density", [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1])
@pytest.mark.parametrize("count", [2500, 40_000])
def test_packed_indices_are_within_a_tenth_of_the_entropy_bound(density: float, count: int) -> None:
    indices = uniform(count, round(count / density))
    bits = 8 * (HEADER_BYTES + size_bytes(INDEX_CODES["packed"], indices, round(count / density)))
    assert bits / count <= 1.1 * bound_bits(density)


def test_packed_indices_take_less_when_clustered() -> None:
    # Layers of the densities 0.3, 0.01 and 0.0003, as many entries of each, in stretches.
    random = np.random.default_rng(5)
    gaps = [random.geometric(d, 500) for _ in range(10) for d in (0.3, 0.01, 0.0003)]
    indices = np.cumsum(np.concatenate(gaps)) - 1
    length = int(indices[-1]) + 1
    bits = 8 * size_bytes(INDEX_CODES["packed"], indices, length) / indices.size
    assert bits <= 1.1 * np.mean([bound_bits(density) for density in (0.3, 0.01, 0.0003)])
    assert bits <= 0.85 * bound_bits(indices.size / length)


@pytest.mark.parametrize(("density", "bits"), [(1e-2, 16.1), (1e-3, 16.3), (1e-4, 17.4)])
def test_blocks_indices_take_about_sixteen_bits(density: float, bits: float) -> None:
    length = 20_000_000
    indices = uniform(round(length * density), length)
    assert 8 * size_bytes(INDEX_CODES["blocks"], indices, length) / indices.size <= bits


def test_long_empty_stretches_cost_a_few_bytes() -> None:
    indices = np.array([5, 2**40 - 1])
    assert size_bytes(INDEX_CODES["blocks"], indices, 2**40) <= 2 * 2 + 2 + 5
    assert size_bytes(INDEX_CODES["packed"], indices, 2**40) <= 32


@every_code
@pytest.mark.parametrize("length", [2**16, 2**20 + 7, 2**31 - 1, 2**31, 2**40, 2**63 - 1])
@pytest.mark.parametrize(
    "offsets",
    [[], [0], [-1], [0, -1], range(1000), range(-1000, 0), range(0, 60_000, 300)],
    ids=["none", "first", "last", "both ends", "first 1000", "last 1000", "one block"],
)
def test_indices_at_borders_round_trip(name: str, length: int, offsets: list[int]) -> None:
    indices = np.array([offset % length for offset in offsets], np.int64)
    code = INDEX_CODES[name]
    assert size_bytes(code, indices, length) <= 8 * len(offsets) + 32


@every_code
@pytest.mark.parametrize("count", [1, 63, 64, 65, 65535, 65536, 65537, 200_000])
def test_full_index_lists_round_trip(name: str, count: int) -> None:
    size = size_bytes(INDEX_CODES[name], np.arange(count), count)
    if name == "packed":
        assert size <= count * (1 + 8 / 64) / 8 + 24  # a bit, and a group's width


@every_code
def test_index_codes_take_little_more_than_raw(name: str) -> None:
    random = np.random.default_rng(6)
    for length in (10**9, 2**31 - 1, 2**40):
        for size in (1, 2, 100):
            # Gaps of all sizes, in the worst of orders: each group has small and large ones.
            sizes = np.minimum(2.0 ** random.uniform(0, 40, 40 * size), length // (80 * size))
            indices = np.unique(np.cumsum(sizes.astype(np.int64) + 1))
            raw = indices.size * index_dtype(length).itemsize
            assert size_bytes(INDEX_CODES[name], indices, length) <= 1.4 * raw + 32


def test_whole_format_sends_no_indices() -> None:
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    vector = SparseVector(np.arange(300, dtype=np.int32), values, 300)
    format = Format(WHOLE, "exact")
    message = encode(vector, 300, format).message
    assert message.size == HEADER_BYTES + 4 * 300
    seen = decode(message, SparseVector.empty(300), 300, 0, format).vector
    assert seen.indices.tolist() == list(range(300))
    assert seen.values.tolist() == values.tolist()


def test_whole_format_refuses_vectors_with_missing_entries() -> None:
    code = ALL_INDEX_CODES[WHOLE]
    with pytest.raises(ValueError, match="all 5 elements must be entries, got 3"):
        code.pack(np.arange(3, dtype=np.int32), 5, np.empty(0, np.uint8))
    with pytest.raises(ValueError, match="it has 3 entries and must have all 5"):
        code.unpack(np.empty(0, np.uint8), 3, 5)


def test_code_numbers_are_unchanged() -> None:
    # If a code's number changed, ranks of different versions would misread each other.
    assert [*INDEX_CODES] == ["raw", "blocks", "packed"]
    assert [*VALUE_CODES] == ["exact", "bf16", "fp16", "int8", "int4", "int3", "int2"]
    assert numbers(EXACT) == (0, 0)
    assert numbered(2, 3) == Format("packed", "int8")
    assert numbered(3, 5) == Format(WHOLE, "int3")


def test_unknown_code_number_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="codes have the numbers 4 and 0; this rank has 4 index codes and 7 value codes",
    ):
        numbered(4, 0)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (Format("zip"), "code of indices must be one of raw, blocks, packed; got 'zip'"),
        (
            Format(values="f8"),
            "code of values must be one of exact, bf16, fp16, int8, int4, int3, int2; got 'f8'",
        ),
    ],
)
def test_unknown_code_name_is_refused_with_the_known_ones(format: Format, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_format(format)


def test_check_format_returns_a_known_format() -> None:
    assert check_format(Format("packed", "bf16")) == Format("packed", "bf16")
