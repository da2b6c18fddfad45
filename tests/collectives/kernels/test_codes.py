"""The contract of the wire's hot loops, for every twin: bytes, errors, and refused input."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import kernels
from collectives.kernels import host, reference
from collectives.kernels.host.library import load_error, use_instructions
from collectives.kernels.reference import STEP, mix
from collectives.kernels.reference_indices import GROUP, index_capacity
from collectives.kernels.reference_values import TOP, exponent_range, value_bytes
from collectives.vector import index_dtype
from collectives.wire import VALUE_CODES as WIRE_VALUE_CODES

CANARY = 0xA5
LENGTHS = [1, 2, 100, 65535, 65536, 65537, 10**6, 2**31 - 1, 2**31, 2**40, 2**63 - 1]
VALUE_CODES = ["bf16", "fp16", "int8", "int4", "int3", "int2"]
FEW_BITS = {"int4": 4, "int3": 3, "int2": 2}

compiled = pytest.mark.skipif(bool(load_error()), reason=load_error())
by_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
by_value_code = pytest.mark.parametrize("code", VALUE_CODES)


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        pytest.param((reference, ""), id="reference"),
        *(pytest.param((host, name), id=name, marks=compiled) for name in ("portable", "AVX2")),
    ],
)
def _twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with every twin, and C++ with either instruction set."""
    twin, instructions = request.param
    widest = host.instructions() if twin is host else ""
    if twin is host and not use_instructions(instructions):
        pytest.skip(f"this processor has no {instructions}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_for_numpy", twin)
        yield
    if twin is host:
        use_instructions(widest)


# Drawn by NumPy from a seed: element by element would take hypothesis ten times as long.
seeds = st.integers(0, 2**32)


@st.composite
def index_lists(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Return indices, spread or in clusters, and the length of their vector."""
    length, count = draw(st.sampled_from(LENGTHS)), draw(st.integers(0, 200))
    random = np.random.default_rng(draw(seeds))
    steps = np.where(random.random(count) < 0.1, random.integers(1, 200_000, count), 1)
    found = draw(
        st.sampled_from(
            [
                random.integers(0, length, count),
                random.integers(0, length) + np.cumsum(steps) - count,
                np.arange(min(count, length)),
                length - 1 - np.arange(min(count, length)),
            ]
        )
    )
    kept = np.unique(found[(found >= 0) & (found < length)])
    return kept.astype(index_dtype(length)), length


@st.composite
def floats(draw: st.DrawFn, dtype: type, finite: bool = True) -> np.ndarray:
    """Return values: any bits there are, subnormal, huge, of one size, or many alike."""
    random, count = np.random.default_rng(draw(seeds)), draw(st.integers(0, 200))
    info = np.finfo(dtype)
    integers = random.integers(-70, 70, count)
    values = draw(
        st.sampled_from(
            [
                random.bytes(count * info.bits // 8),
                integers * info.smallest_subnormal,
                info.max * (1 - random.integers(0, 4096, count) * 2.0**-14),
                random.standard_normal(count),
                random.standard_normal(count) * 2.0 ** random.integers(-60, 60, count),
                integers / 16,
                integers * 0.0,
            ]
        )
    )
    bits = isinstance(values, bytes)
    found = np.frombuffer(values, dtype).copy() if bits else values.astype(dtype)
    if finite:
        found[~np.isfinite(found)] = 1
    return found


def packed_indices(code: str, indices: np.ndarray, length: int) -> np.ndarray:
    """Return the bytes; check that nothing is written beyond the capacity."""
    capacity = index_capacity(indices.size, length, code)
    out = np.full(capacity + 16, CANARY, np.uint8)
    used = kernels.pack_indices(indices, length, out, code)
    assert used <= capacity
    assert (out[used:] == CANARY).all()
    return out[:used]


def packed_values(code: str, values: np.ndarray) -> tuple[np.ndarray, int]:
    size = WIRE_VALUE_CODES[code].size_bytes(values.size, values.itemsize)
    out = np.full(size + 16, CANARY, np.uint8)
    exponent = kernels.pack_values(values, out[:size], code)
    assert exponent in exponent_range(code, values.dtype)
    assert (out[size:] == CANARY).all()
    return out[:size], exponent


def rounded(code: str, values: np.ndarray) -> np.ndarray:
    """Return the values as a receiver decodes them."""
    data, exponent = packed_values(code, values)
    return kernels.unpack_values(data, values.size, exponent, values.dtype, code)


# ---- indices


@pytest.mark.parametrize("code", ["blocks", "rice"])
@given(index_lists())
def test_packed_indices_round_trip(code: str, case: tuple[np.ndarray, int]) -> None:
    indices, length = case
    data = packed_indices(code, indices, length)
    found, used = kernels.unpack_indices(data, indices.size, length, code)
    assert found.dtype == indices.dtype
    assert found.tolist() == indices.tolist()
    assert used == data.size


@pytest.mark.parametrize("code", ["blocks", "rice"])
@given(index_lists())
def test_packed_indices_have_the_references_bytes(code: str, case: tuple[np.ndarray, int]) -> None:
    indices, length = case
    expected = np.empty(index_capacity(indices.size, length, code), np.uint8)
    used = reference.pack_indices(indices, length, expected, code)
    assert packed_indices(code, indices, length).tobytes() == expected[:used].tobytes()


def test_blocks_bytes_are_as_drawn() -> None:
    indices = np.array([0, 1, 65535, *range(4 * 65536, 4 * 65536 + 200)], np.int32)
    data = packed_indices("blocks", indices, 10**6)
    assert data[: 2 * 203].view(np.uint16).tolist() == [0, 1, 65535, *range(200)]
    assert data[2 * 203 :].tobytes() == bytes.fromhex("03 00 03 C8 01")


def test_rice_bytes_are_as_drawn() -> None:
    # Gaps 2, 0, 1 and none wider than their mean: width 0, quotients 2, 0, 1.
    data = packed_indices("rice", np.array([2, 3, 5], np.int32), 10)
    assert data.tobytes() == bytes(8) + (0b101100).to_bytes(8, "little")
    # 63 gaps of 0 and one of 1000: at width 0 it escapes, and 16 + 984 is what it is.
    data = packed_indices("rice", np.array([*range(63), 1063], np.int32), 2000)
    unary = (2**63 - 1) | 1 << (63 + 16)
    expected = bytes(8) + unary.to_bytes(16, "little") + (984).to_bytes(8, "little")
    assert data.tobytes() == expected
    # At width 3 the rests of 64 entries take three words.
    indices = np.cumsum(np.arange(64) % 8 + 1).astype(np.int32) - 1
    data = packed_indices("rice", indices, 1000)
    assert data[0] == 2
    rests = int.from_bytes(data[8:24].tobytes(), "little")
    assert [rests >> 2 * i & 3 for i in range(64)] == [i % 8 % 4 for i in range(64)]


@given(index_lists())
def test_in_order_agrees_with_a_sort(case: tuple[np.ndarray, int]) -> None:
    indices, length = case
    assert kernels.in_order(indices, length)
    for bad in (np.repeat(indices, 2), indices[::-1].copy(), indices - 1 - length // 2):
        wanted = sorted({index for index in bad.tolist() if 0 <= index < length})
        assert kernels.in_order(bad, length) == (bad.tolist() == wanted)


@pytest.mark.parametrize(
    ("offsets", "tail", "text"),
    [
        ([1, 2, 6], "", "do not have 3 entries"),
        ([1, 2, 6], "02", "do not have 3 entries"),
        ([1, 2, 6], "04", "do not have 3 entries"),
        ([1, 2, 6], "02 00", "do not have 3 entries"),
        ([1, 2, 6], "02 00 02 02", "do not have 3 entries"),
        ([1, 2, 6], "82", "do not have 3 entries"),
        ([1, 2, 6], "02 00 00 01 01", "stretch of empty blocks has length 0"),
        ([1, 2, 6], "02 00 0F 01", "go on beyond the 1000000 elements"),
        ([1, 2, 6], "02 00 FF FF FF FF FF FF 7F 01", "go on beyond the 1000000 elements"),
        ([1, 2, 6], "02 00 82 80 80 80 80 80 80 00 01", "too large"),
        ([1, 2, 60000], "02 00 0E 01", "strictly increasing"),
        ([2, 1, 6], "03", "strictly increasing"),
        ([1, 2, 2], "01 02", "strictly increasing"),
    ],
)
def test_malformed_blocks_are_refused(offsets: list[int], tail: str, text: str) -> None:
    data = np.array(offsets, np.uint16).tobytes() + bytes.fromhex(tail)
    with pytest.raises(ValueError, match=text):
        kernels.unpack_indices(np.frombuffer(data, np.uint8), 3, 10**6, "blocks")


def test_valid_blocks_at_the_limits_are_read() -> None:
    data = np.array([1, 2, 2], np.uint16).tobytes() + bytes.fromhex("02 00 0E 01 00")
    indices, used = kernels.unpack_indices(np.frombuffer(data, np.uint8), 3, 10**6, "blocks")
    assert (indices.tolist(), used) == ([1, 2, 15 * 65536 + 2], 10)


def test_blocks_too_short_for_their_offsets_are_refused() -> None:
    with pytest.raises(ValueError, match="3 offsets take 6 bytes, there are 5"):
        kernels.unpack_indices(np.zeros(5, np.uint8), 3, 10**6, "blocks")


def test_block_with_more_than_65536_entries_is_refused() -> None:
    offsets = np.concatenate([np.arange(65536), [65535]]).astype(np.uint16).view(np.uint8)
    data = np.concatenate([offsets, np.frombuffer(bytes.fromhex("81 80 04"), np.uint8)])
    with pytest.raises(ValueError, match="too large"):
        kernels.unpack_indices(data, 65537, 10**6, "blocks")


def rice_bytes(widths: list[int], rests: int, rest_words: int, unary: int, tail: bytes = b""):
    parts = [bytes(widths).ljust(8, b"\0"), rests.to_bytes(8 * rest_words, "little")]
    return np.frombuffer(b"".join([*parts, unary.to_bytes(8, "little"), tail]), np.uint8)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (np.zeros(7, np.uint8), "1 widths take 8 bytes, there are 7"),
        (rice_bytes([53], 0, 3, 0b111), "widths must lie in 0..52, got 53"),
        (rice_bytes([0, 1], 0, 0, 0b111), "padding behind its widths"),
        (rice_bytes([50], 0, 1, 0)[:-8], "rests take 32 bytes, there are 16"),
        (rice_bytes([2], 1 << 6, 1, 0b111), "padding behind its rests"),
        (rice_bytes([2], 0, 1, 0b111)[:16], "0 bytes do not hold its 3 quotients"),
        (rice_bytes([0], 0, 0, 0b11), "has 2 quotients of 3"),
        (rice_bytes([0], 0, 0, 0b1111), "padding behind its quotients"),
        (rice_bytes([0], 0, 0, 1 << 63 | 0b111), "padding behind its quotients"),
        (rice_bytes([0], 0, 0, 0b111)[:15], "padding behind its quotients"),
        (rice_bytes([0], 0, 0, 0b11 | 1 << 19), "quotients must lie in 0..16, got 17"),
        (rice_bytes([0], 0, 0, 0b11 | 1 << 18), "its escapes end at byte 24, there are 16"),
        (rice_bytes([0], 0, 0, 0b11 | 1 << 18, b"\0\0\0\0\0\0\1\0"), "behind its escapes"),
        (rice_bytes([0], 0, 0, 0b11 | 1 << 18, b"\x65".ljust(8, b"\0")), "gap is larger than"),
        (rice_bytes([0], 0, 0, 0b11 | 1 << 18, b"\x63".ljust(8, b"\0")), "must lie in 0..99"),
        (rice_bytes([7], 99 << 14, 1, 0b111), "must lie in 0..99"),
        (rice_bytes([52], 0, 3, 1 << 15 | 1 << 31 | 1 << 47), "must lie in 0..99"),
    ],
)
def test_malformed_rice_codes_are_refused(data: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kernels.unpack_indices(data, 3, 100, "rice")


def test_valid_rice_codes_at_the_limits_are_read() -> None:
    indices, used = kernels.unpack_indices(rice_bytes([7], 97 << 14, 1, 0b111), 3, 100, "rice")
    assert (indices.tolist(), used) == ([0, 1, 99], 24)
    tail = b"\x51".ljust(8, b"\0")
    data = rice_bytes([0], 0, 0, 0b11 | 1 << 18, tail)
    indices, used = kernels.unpack_indices(data, 3, 100, "rice")
    assert (indices.tolist(), used) == ([0, 1, 99], 24)


@pytest.mark.parametrize("code", ["blocks", "rice"])
def test_count_beyond_the_bytes_is_refused_without_reserving_memory(code: str) -> None:
    with pytest.raises(ValueError, match="bytes, there are 100"):
        kernels.unpack_indices(np.zeros(100, np.uint8), 2**50, 2**60, code)


def test_rice_count_backed_only_by_widths_reserves_little_memory() -> None:
    data = np.zeros(1 << 12, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="bytes do not hold its 245760 quotients"):
            kernels.unpack_indices(data, 60 * data.size, 2**40, "rice")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100 * data.size


@pytest.mark.parametrize("code", ["blocks", "rice"])
@given(st.binary(max_size=200), st.integers(0, 70), st.sampled_from(LENGTHS))
def test_any_bytes_decode_to_valid_indices_or_are_refused(
    code: str, data: bytes, count: int, length: int
) -> None:
    content = np.frombuffer(data, np.uint8)
    try:
        indices, used = kernels.unpack_indices(content, count, length, code)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            reference.unpack_indices(content, count, length, code)
        return
    expected, taken = reference.unpack_indices(content, count, length, code)
    assert (indices.tolist(), used) == (expected.tolist(), taken)
    assert indices.size == count
    assert reference.in_order(indices, length)


def test_rice_groups_have_their_own_width() -> None:
    # A dense layer behind a sparse one: each group has its own width, and one gap escapes.
    random = np.random.default_rng(1)
    sparse = np.cumsum(random.geometric(1 / 4000, 640))
    dense = sparse[-1] + 10**6 + np.cumsum(random.geometric(1 / 8, 640))
    indices = np.concatenate([sparse, dense]).astype(np.int32)
    data = packed_indices("rice", indices, 10**7)
    assert data[:10].min() >= 10
    assert data[10:20].max() <= 3
    assert indices.size == 20 * GROUP


# ---- values


@by_value_code
@by_dtype
def test_rounding_error_is_exactly_representable(code: str, dtype: type) -> None:
    @given(floats(dtype))
    def check(values: np.ndarray) -> None:
        seen = rounded(code, values)
        assert seen.dtype == values.dtype
        error = values - seen
        # Knuth's TwoSum: `lost` is what the addition rounds away, and no more than that.
        total = seen + error
        part = total - seen
        lost = (seen - (total - part)) + (error - part)
        assert total.tolist() == values.tolist()
        assert not lost.any()

    check()


@by_value_code
@by_dtype
def test_rounding_is_to_nearest_within_the_promised_range(code: str, dtype: type) -> None:
    @given(floats(dtype))
    def check(values: np.ndarray) -> None:
        seen = rounded(code, values)
        sizes, error = np.abs(values), np.abs(values - seen)
        if code == "int8":
            blocks = np.pad(sizes, (0, -values.size % 64)).reshape(-1, 64).max(axis=1)
            largest = np.repeat(blocks, 64)[: values.size]
            # Half a step; a whole one beyond the last integer, 127.
            bound = largest / np.where(sizes > largest * dtype(0.99), 64, 128)
        elif code in FEW_BITS:
            blocks = np.pad(sizes, (0, -values.size % 256)).reshape(-1, 256).max(axis=1)
            largest = np.repeat(blocks, 256)[: values.size]
            step = largest / dtype(2 ** (FEW_BITS[code] - 1))
            # Half a step at the most; beyond the last integer what is cut.
            most = step * dtype(8 / 9) * (2 ** (FEW_BITS[code] - 1) - 1)
            bound = np.maximum(step / 2, sizes - most)
        else:
            bound = sizes * dtype(2.0 ** -{"bf16": 8, "fp16": 11}[code])
            # Where rounding up would be infinite, it is down.
            bound *= np.where(sizes > np.finfo(dtype).max / 1.01, dtype(2), dtype(1))
        finest = {"bf16": 232, "fp16": 37, "int8": 248}.get(code, 28)
        smallest = np.ldexp(sizes.max(initial=0), -finest)
        if code in FEW_BITS:  # nor is any scale finer than 8 of the smallest numbers
            smallest = np.maximum(smallest, 8 * np.finfo(dtype).smallest_subnormal)
        assert (error <= np.maximum(bound, smallest)).all()

    check()


@by_value_code
@by_dtype
def test_packed_values_equal_the_reference(code: str, dtype: type) -> None:
    @given(floats(dtype, finite=False))
    def check(values: np.ndarray) -> None:
        data, exponent = packed_values(code, values)
        expected = np.empty_like(data)
        assert reference.pack_values(values, expected, code) == exponent
        assert data.tobytes() == expected.tobytes()
        theirs = reference.unpack_values(data, values.size, exponent, values.dtype, code)
        assert rounded(code, values).tobytes() == theirs.tobytes()

    check()


@pytest.mark.parametrize("code", ["bf16", "fp16"])
@by_dtype
def test_rounding_is_idempotent(code: str, dtype: type) -> None:
    @given(floats(dtype))
    def check(values: np.ndarray) -> None:
        once = rounded(code, values)
        largest = np.frexp([np.abs(once).max(initial=0), np.abs(values).max(initial=0)])[1]
        if largest[0] == largest[1]:  # else the scale is another
            assert rounded(code, once).tobytes() == once.tobytes()

    check()


@by_value_code
@by_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stay_non_finite(code: str, dtype: type, bad: float) -> None:
    values = np.linspace(-3, 3, 200, dtype=dtype)
    values[70] = bad
    seen = rounded(code, values)
    assert not np.isfinite(seen[70])
    if code == "int8":
        assert np.isnan(seen[64:128]).all()
    elif code in FEW_BITS:
        assert np.isnan(seen).all()
    else:
        assert np.isnan(seen[70]) == np.isnan(bad)
        assert np.isfinite(np.delete(seen, 70)).all()


@by_dtype
def test_fp16_values_decode_exactly_when_a_thread_flushes_denormals(
    dtype: type,
) -> None:
    """Else the update would depend on a rank's processor: some have an instruction for halves."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(dtype)
    torch.set_flush_denormal(True)
    try:
        seen = kernels.unpack_values(halves.view(np.uint8), halves.size, 0, np.dtype(dtype), "fp16")
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(seen, expected, equal_nan=True)


@by_dtype
def test_16_bit_values_are_the_scaled_standard_formats(dtype: type) -> None:
    values = np.array([1.0, 1.999, -0.37, 2.0**-14, 0.0, -0.0], dtype)
    data, exponent = packed_values("fp16", values)
    assert exponent == -TOP["fp16"]
    halves = (values * dtype(2.0**14)).astype(np.float16)
    assert data.tobytes() == halves.tobytes()
    data, exponent = packed_values("bf16", values)
    assert exponent == -TOP["bf16"]
    upper = (values.astype(np.float32) * np.float32(2.0**100)).view(np.uint32) + 0x8000 >> 16
    assert data.view(np.uint16).tolist() == upper.tolist()


def test_int8_blocks_have_their_own_step() -> None:
    values = np.concatenate([np.full(64, 100.0), np.full(64, -0.01), np.zeros(64), [3.0]])
    data, exponent = packed_values("int8", values.astype(np.float32))
    assert exponent == 0
    assert data[:4].tolist() == [0, 13, 0, 5]
    assert data[4:].view(np.int8)[[0, 64, 128, 192]].tolist() == [100, -82, 0, 96]


@pytest.mark.parametrize(
    ("code", "bits", "integers"), [("int4", 4, [7, -5, 0, 1]), ("int3", 3, [3, -3, 0, 1])]
)
def test_few_bits_bytes_are_as_drawn(code: str, bits: int, integers: list[int]) -> None:
    # The first block's scale is 9 * 2^-6 of 1.125 * 2^(bits - 4); the second's 2^-20 of that.
    block = np.zeros(256)
    block[:4] = 2.0 ** (bits - 4) * np.array([1.125, -0.75, 0.0625, 0.15])
    values = np.concatenate([block, block * 2.0**-20, [0.0] * 256, [2.0**-40]])
    data, exponent = packed_values(code, values.astype(np.float32))
    assert exponent == -6
    assert data[:4].tolist() == [15 - 9, 8 * 20 + 15 - 9, 0, 254]
    packed = int.from_bytes(data[4:].tobytes(), "little")
    fields = [packed >> bits * i & 2**bits - 1 for i in (0, 1, 2, 3, 4, 256, 512, 768)]
    wanted = [*integers, 0, integers[0], 0, 0]
    assert fields == [integer % 2**bits for integer in wanted]
    seen = rounded(code, values.astype(np.float32))
    scale = 9 * 2.0**-6
    assert seen[:4].tolist() == [integer * scale for integer in integers]
    assert seen[256:260].tolist() == [integer * scale * 2.0**-20 for integer in integers]
    assert not seen[512:].any()


def test_int2_bytes_have_five_values_each_as_drawn() -> None:
    block = np.zeros(240)
    block[:6] = [0.28125, -0.1875, 0.01, 0.0375, -0.25, 0.25]
    values = np.concatenate([block, block * 2.0**-20, [0.25, -0.25]]).astype(np.float32)
    data, exponent = packed_values("int2", values)
    assert exponent == -6
    assert data[:3].tolist() == [15 - 9, 8 * 20 + 15 - 9, 15 - 8]
    zeros = 1 + 3 + 9 + 27 + 81
    first = [2 + 3 * 0 + 9 * 1 + 27 * 1 + 81 * 0, zeros + 1, *46 * [zeros]]
    assert data[3:].tolist() == [*first, *first, zeros + 1 - 3]
    seen = rounded("int2", values)
    scale = 9 * 2.0**-6
    assert seen[:7].tolist() == [scale, -scale, 0.0, 0.0, -scale, scale, 0.0]
    assert np.array_equal(seen[240:480], seen[:240] * 2.0**-20)
    assert seen[480:].tolist() == [0.125, -0.125]


@pytest.mark.parametrize("code", FEW_BITS)
@by_dtype
def test_any_bytes_decode_as_few_bits_as_in_the_reference(code: str, dtype: type) -> None:
    @given(st.integers(0, 600), seeds, st.sampled_from([0, -1, 1]))
    def check(count: int, seed: int, edge: int) -> None:
        size = value_bytes(count, code)
        data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        allowed = exponent_range(code, np.dtype(dtype))
        exponent = -20 if edge == 0 else allowed[min(edge, 0)]
        theirs = reference.unpack_values(data, count, exponent, np.dtype(dtype), code)
        seen = kernels.unpack_values(data, count, exponent, np.dtype(dtype), code)
        assert seen.tobytes() == theirs.tobytes()

    check()


@by_value_code
def test_empty_values_take_no_bytes(code: str) -> None:
    data, exponent = packed_values(code, np.empty(0, np.float32))
    assert (data.size, exponent) == (0, -TOP[code])


# ---- the checksum


def by_definition(data: bytes, seed: int) -> int:
    """Return the checksum, word by word, as its docstring draws it."""
    mask = 2**64 - 1
    total = (seed + len(data)) & mask
    for start in range(0, len(data), 4096):
        block = data[start : start + 4096]
        block += bytes(-len(block) % 8)
        nh = 0
        for i in range(len(block) // 8):
            key = mix((i + 1) * STEP & mask)
            word = int.from_bytes(block[8 * i : 8 * i + 8], "little")
            low = (word + key) % 2**32
            high = ((word >> 32) + (key >> 32)) % 2**32
            nh += low * high
        total = (total + nh) * STEP & mask
    return mix(total)


@given(st.integers(0, 300) | st.integers(4000, 9000), st.integers(0, 2**64 - 1))
def test_checksum_equals_its_definition(size: int, seed: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 1, np.uint8)[1:]
    assert kernels.checksum(data, seed) == by_definition(data.tobytes(), seed)


def test_one_flipped_bit_changes_half_of_the_checksums_bits() -> None:
    data = np.random.default_rng(3).integers(0, 256, 5000, np.uint8)
    before = kernels.checksum(data)
    changed = []
    for at in range(0, 8 * data.size, 7):
        data[at // 8] ^= 1 << at % 8
        changed.append((kernels.checksum(data) ^ before).bit_count())
        data[at // 8] ^= 1 << at % 8
    assert min(changed) > 0
    assert 30 < np.mean(changed) < 34


def test_checksum_depends_on_length_block_order_and_seed() -> None:
    assert len({kernels.checksum(np.zeros(size, np.uint8)) for size in range(9000)}) == 9000
    data = np.random.default_rng(4).integers(0, 256, 3 * 4096, np.uint8)
    moved = np.concatenate([data[4096:8192], data[:4096], data[8192:]])
    assert kernels.checksum(moved) != kernels.checksum(data)
    assert kernels.checksum(data, 1) != kernels.checksum(data)
