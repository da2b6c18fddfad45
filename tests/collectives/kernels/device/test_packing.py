"""Offsets and 16-bit values against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.kernels.device import packing
from collectives.kernels.device.machine import Scratch

EDGES = [0, 1, 65_535, 65_536, 65_537, 131_071, 131_072, 393_215, 393_216, 399_999]


@settings(max_examples=40)
@given(st.sets(st.integers(0, 399_999) | st.sampled_from(EDGES), max_size=200))
def test_offsets_come_back_as_indices(scratch: Scratch, held: set[int]) -> None:
    machine: Any = scratch.machine
    indices, length = np.array(sorted(held), np.int32), 400_000
    counts, offsets = packing.pack_offsets(scratch, machine.put(indices), length)
    assert machine.fetch(counts).tolist() == np.bincount(indices >> 16, minlength=7).tolist()
    assert machine.fetch(offsets).tolist() == (indices & 0xFFFF).tolist()
    back = packing.unpack_offsets(scratch, counts, offsets, length)
    assert back.dtype == np.int32
    assert machine.fetch(back).tolist() == indices.tolist()


@pytest.mark.parametrize("length", [1, 65_536, 65_537, 131_072])
def test_a_full_vector_fills_every_block(scratch: Scratch, length: int) -> None:
    machine: Any = scratch.machine
    counts, offsets = packing.pack_offsets(
        scratch, machine.put(np.arange(length, dtype=np.int32)), length
    )
    assert machine.fetch(counts).sum() == length
    back = packing.unpack_offsets(scratch, counts, offsets, length)
    assert (machine.fetch(back) == np.arange(length)).all()


def test_the_last_block_of_the_longest_narrow_vector_is_packed(scratch: Scratch) -> None:
    machine: Any = scratch.machine
    length = 2**31 - 1
    indices = np.array([0, 65_536, length - 2, length - 1], np.int32)
    counts, offsets = packing.pack_offsets(scratch, machine.put(indices), length)
    assert machine.fetch(counts)[[0, 1, -1]].tolist() == [1, 1, 2]
    back = packing.unpack_offsets(scratch, counts, offsets, length)
    assert machine.fetch(back).tolist() == indices.tolist()


def test_wide_indices_are_packed_too(scratch: Scratch) -> None:
    machine: Any = scratch.machine
    indices, length = np.array([5, 2**32 + 7, 2**32 + 70_000], np.int64), 2**32 + 100_000
    counts, offsets = packing.pack_offsets(scratch, machine.put(indices), length)
    back = packing.unpack_offsets(scratch, counts, offsets, length)
    assert back.dtype == np.int64
    assert machine.fetch(back).tolist() == indices.tolist()


def every_half() -> np.ndarray:
    return np.arange(1 << 16).astype(np.uint16).view(np.float16)


def test_every_float16_widens_exactly_and_comes_back(scratch: Scratch) -> None:
    machine: Any = scratch.machine
    halves = every_half()
    wide = packing.widen_values(scratch, machine.put(halves))
    assert np.array_equal(machine.fetch(wide), halves.astype(np.float32), equal_nan=True)
    back = machine.fetch(packing.round_values(scratch, wide, np.float16))
    numbers = ~np.isnan(halves)
    assert (back.view(np.uint16) == halves.view(np.uint16))[numbers].all()
    assert np.isnan(back[~numbers]).all()


def values(random: np.random.Generator) -> np.ndarray:
    """Return float32 values of all magnitudes, and ties of both 16-bit formats."""
    bits = random.integers(0, 2**32, 20_000, dtype=np.uint32)
    bits[:5000] = bits[:5000] & ~np.uint32(0xFFFF) | 0x8000  # halfway between two bfloat16
    bits[5000:9000] = bits[5000:9000] & ~np.uint32(0x1FFF) | 0x1000  # and between two float16
    spread = bits.view(np.float32).copy()
    spread[9000:] = random.standard_normal(11_000) * 10.0 ** random.integers(-9, 6, 11_000)
    spread[-6:] = 0.0, -0.0, np.inf, -np.inf, np.nan, 65_520.0
    return spread


def test_values_are_rounded_to_float16_as_numpy_rounds(
    scratch: Scratch, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    wide = values(random)
    with np.errstate(over="ignore"):
        expected = wide.astype(np.float16)
    got = machine.fetch(packing.round_values(scratch, machine.put(wide), np.float16))
    numbers = ~np.isnan(wide)
    assert (got.view(np.uint16) == expected.view(np.uint16))[numbers].all()
    assert np.isnan(got[~numbers]).all()


def test_values_are_rounded_to_the_nearest_bfloat16_ties_to_even(
    scratch: Scratch, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    wide = values(random)
    rounded = packing.round_values(scratch, machine.put(wide), np.uint16)
    bits = machine.fetch(rounded).astype(np.uint32)
    numbers = np.isfinite(wide)
    down = wide.view(np.uint32)[numbers] >> 16
    tail = wide.view(np.uint32)[numbers] & 0xFFFF
    up = (tail > 0x8000) | ((tail == 0x8000) & (down & 1 == 1))
    assert (bits[numbers] == down + up).all()
    back = machine.fetch(packing.widen_values(scratch, rounded))
    assert (back.view(np.uint32) == bits << 16).all()
    assert np.isnan(back[np.isnan(wide)]).all()
    assert (back[np.isinf(wide)] == wide[np.isinf(wide)]).all()


def test_nothing_packs_to_nothing(scratch: Scratch) -> None:
    machine: Any = scratch.machine
    counts, offsets = packing.pack_offsets(scratch, machine.put(np.empty(0, np.int32)), 70_000)
    assert machine.fetch(counts).tolist() == [0, 0]
    assert packing.unpack_offsets(scratch, counts, offsets, 70_000).size == 0
    assert packing.round_values(scratch, machine.put(np.empty(0, np.float32)), np.float16).size == 0
