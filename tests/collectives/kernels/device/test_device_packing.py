"""Offsets and 16-bit values on a GPU: the bytes of the NumPy reference, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.kernels import reference
from collectives.kernels.device import codes
from collectives.kernels.device.machine import Scratch
from collectives.kernels.reference_indices import index_capacity
from collectives.kernels.reference_values import BITS, exponent_range, value_bytes
from collectives.vector import index_dtype

EDGES = [0, 1, 65_535, 65_536, 65_537, 131_071, 131_072, 393_215, 393_216, 399_999]


def check_blocks(scratch: Scratch, indices: np.ndarray, length: int) -> None:
    """The reference's bytes are written, and read again."""
    machine: Any = scratch.machine
    capacity = index_capacity(indices.size, length, "blocks")
    expected = np.empty(capacity, np.uint8)
    used = reference.pack_indices(indices, length, expected, "blocks")
    out = machine.empty(capacity, np.uint8)
    assert codes.pack_indices(scratch, machine.put(indices), length, out, "blocks") == used
    assert machine.fetch(out)[:used].tobytes() == expected[:used].tobytes()
    padded = machine.put(np.append(expected[:used], np.zeros(3, np.uint8)))
    back, taken = codes.unpack_indices(scratch, padded, indices.size, length, "blocks")
    assert taken == used
    assert back.dtype == index_dtype(length)
    assert machine.fetch(back).tolist() == indices.tolist()


@settings(max_examples=40)
@given(st.sets(st.integers(0, 399_999) | st.sampled_from(EDGES), max_size=200))
def test_packed_indices_equal_the_reference(scratch: Scratch, held: set[int]) -> None:
    check_blocks(scratch, np.array(sorted(held), np.int32), 400_000)


@pytest.mark.parametrize("length", [1, 65_536, 65_537, 131_072])
def test_packed_indices_of_a_full_vector_equal_the_reference(scratch: Scratch, length: int) -> None:
    check_blocks(scratch, np.arange(length, dtype=np.int32), length)


def test_packed_indices_at_the_end_of_the_longest_int32_vector_equal_reference(
    scratch: Scratch,
) -> None:
    length = 2**31 - 1
    check_blocks(scratch, np.array([0, 65_536, length - 2, length - 1], np.int32), length)


def test_packed_int64_indices_equal_the_reference(scratch: Scratch) -> None:
    indices = np.array([5, 2**32 + 7, 2**32 + 70_000], np.int64)
    check_blocks(scratch, indices, 2**32 + 100_000)


@settings(max_examples=100)
@given(st.binary(max_size=60), st.integers(0, 12), st.sampled_from([1, 9, 200_000, 2**40]))
def test_malformed_block_counts_are_refused_as_by_the_reference(
    scratch: Scratch, content: bytes, count: int, length: int
) -> None:
    machine: Any = scratch.machine
    data = np.frombuffer(content, np.uint8)
    expected, used, expected_error = outcome(
        lambda: reference.unpack_indices(data, count, length, "blocks")
    )
    held = machine.put(data)
    got, taken, got_error = outcome(
        lambda: codes.unpack_indices(scratch, held, count, length, "blocks")
    )
    assert (taken, got_error) == (used, expected_error)
    assert machine.fetch(got).tolist() == expected.tolist()


def outcome(unpack: Any) -> tuple[Any, int, str]:
    """Return the indices, their bytes and ""; or no indices, 0 and the error's text."""
    try:
        return *unpack(), ""
    except ValueError as error:
        return np.empty(0), 0, str(error)


def values(random: np.random.Generator, dtype: type) -> np.ndarray:
    """Return values of many magnitudes, ties of both 16-bit formats, zeros and subnormals."""
    bits = random.integers(0, 2**32, 20_000, dtype=np.uint32)
    bits &= 0x83FFFFFF | np.uint32(0x3C000000)  # exponents from -126 up to 1
    bits[:5000] = bits[:5000] & ~np.uint32(0xFFFF) | 0x8000  # halfway between two bfloat16
    bits[5000:9000] = bits[5000:9000] & ~np.uint32(0x1FFF) | 0x1000  # and between two float16
    spread = bits.view(np.float32).astype(dtype)
    spread[9000:] = random.standard_normal(11_000) * 10.0 ** random.integers(-9, 6, 11_000)
    spread[-4:] = 0.0, -0.0, 1e-40, -3e-45
    if dtype == np.float64:
        spread[:9000] += spread[:9000] * 1e-12 * random.integers(-1, 2, 9000)
    return spread


SPECIAL = {
    "normal": lambda dtype: [],
    "all subnormal": lambda dtype: None,
    "largest": lambda dtype: [np.finfo(dtype).max, -np.finfo(dtype).max],
    "infinite": lambda dtype: [np.inf, -np.inf],
    "nan": lambda dtype: [np.nan, -np.nan],
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("code", codes.NARROW)
def test_values_round_and_widen_to_16_bits_as_in_the_reference(
    scratch: Scratch, code: str, dtype: type, special: str, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    wide = values(random, dtype)
    added = SPECIAL[special](dtype)
    wide = wide * np.finfo(dtype).tiny / 8e5 if added is None else np.append(wide, added)
    wide = wide.astype(dtype)
    expected = np.empty(2 * wide.size, np.uint8)
    exponent = reference.pack_values(wide, expected, code)
    out = machine.empty(2 * wide.size, np.uint8)
    assert codes.pack_values(scratch, machine.put(wide), out, code) == exponent
    assert machine.fetch(out).tobytes() == expected.tobytes()
    back = codes.unpack_values(scratch, out, wide.size, exponent, np.dtype(dtype), code)
    again = reference.unpack_values(expected, wide.size, exponent, np.dtype(dtype), code)
    assert np.array_equal(machine.fetch(back), again, equal_nan=True)
    assert (np.signbit(machine.fetch(back)) == np.signbit(again))[~np.isnan(again)].all()


@pytest.mark.parametrize("exponent", [0, -90, 113])
@pytest.mark.parametrize("code", codes.NARROW)
def test_all_16_bit_values_decode_as_in_the_reference(
    scratch: Scratch, code: str, exponent: int
) -> None:
    machine: Any = scratch.machine
    every = np.arange(1 << 16).astype(np.uint16).view(np.uint8)
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        back = codes.unpack_values(scratch, machine.put(every), 1 << 16, exponent, dtype, code)
        again = reference.unpack_values(every, 1 << 16, exponent, dtype, code)
        assert np.array_equal(machine.fetch(back), again, equal_nan=True)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("code", BITS)
def test_values_of_few_bits_encode_and_decode_as_in_the_reference(
    scratch: Scratch, code: str, dtype: type, special: str, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    wide = values(random, dtype)[::13]
    added = SPECIAL[special](dtype)
    wide = wide * np.finfo(dtype).tiny / 8e5 if added is None else np.append(wide, added)
    wide = np.append(np.zeros(256), wide).astype(dtype)
    size = value_bytes(wide.size, code)
    expected = np.empty(size, np.uint8)
    exponent = reference.pack_values(wide, expected, code)
    out = machine.empty(size, np.uint8)
    assert codes.pack_values(scratch, machine.put(wide), out, code) == exponent
    assert machine.fetch(out).tobytes() == expected.tobytes()
    back = codes.unpack_values(scratch, out, wide.size, exponent, np.dtype(dtype), code)
    again = reference.unpack_values(expected, wide.size, exponent, wide.dtype, code)
    assert machine.fetch(back).tobytes() == again.tobytes()


@pytest.mark.parametrize("count", [0, 1, 4, 5, 7, 8, 239, 240, 241, 255, 256, 257, 1001])
@pytest.mark.parametrize("code", BITS)
def test_any_bytes_decode_as_few_bits_as_in_the_reference(
    scratch: Scratch, code: str, count: int, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    data = random.integers(0, 256, value_bytes(count, code), np.uint8)
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        allowed = exponent_range(code, dtype)
        for exponent in (0, allowed[0], allowed[-1]):
            back = codes.unpack_values(scratch, machine.put(data), count, exponent, dtype, code)
            again = reference.unpack_values(data, count, exponent, dtype, code)
            assert machine.fetch(back).tobytes() == again.tobytes()


@pytest.mark.parametrize("code", codes.NARROW)
def test_empty_list_takes_no_bytes(scratch: Scratch, code: str) -> None:
    machine: Any = scratch.machine
    check_blocks(scratch, np.empty(0, np.int32), 70_000)
    no_values, out = np.empty(0, np.float32), np.empty(0, np.uint8)
    exponent = codes.pack_values(scratch, machine.put(no_values), machine.put(out), code)
    assert exponent == reference.pack_values(no_values, out, code)
    assert codes.unpack_values(scratch, out, 0, exponent, np.dtype("f"), code).size == 0
