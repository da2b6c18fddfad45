"""Single entries and whole vectors on a GPU against the NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.kernels import reference
from collectives.kernels.device import entries
from collectives.kernels.device.machine import Scratch
from collectives.vector import SparseVector

by_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@settings(max_examples=40)
@given(st.sets(st.integers(0, 300)), st.sets(st.integers(0, 300)), st.sampled_from("il"))
def test_containment_is_that_of_sets(
    scratch: Scratch, held: set[int], wanted: set[int], code: str
) -> None:
    machine: Any = scratch.machine
    a, b = (machine.put(np.array(sorted(part), code)) for part in (held, wanted))
    found = machine.fetch(entries.contains(scratch, a, b))
    assert found.dtype == np.bool_
    assert found.tolist() == [index in held for index in sorted(wanted)]


@pytest.mark.parametrize("count", [0, 1, 5000])
@by_dtype
def test_entries_are_added_cleared_and_taken(
    scratch: Scratch, count: int, dtype: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    dense = random.standard_normal(9000).astype(dtype)
    indices = np.sort(random.choice(9000, count, replace=False)).astype(np.int32)
    values = random.standard_normal(count).astype(dtype)

    held, at = machine.put(dense), machine.put(indices)
    entries.add_at(scratch, held, SparseVector(at, machine.put(values), 9000))
    dense[indices] += values
    assert machine.fetch(held).tobytes() == dense.tobytes()

    taken = machine.fetch(entries.take_at(scratch, held, at))
    assert taken.tobytes() == dense[indices].tobytes()
    dense[indices] = 0
    assert machine.fetch(held).tobytes() == dense.tobytes()

    held = machine.put(np.ones(9000, dtype))
    entries.clear_at(scratch, held, at)
    assert machine.fetch(held).sum() == 9000 - count


@pytest.mark.parametrize("size", [0, 1, 3, 4, 700, 20_001])
@by_dtype
def test_one_bad_number_anywhere_is_found(scratch: Scratch, size: int, dtype: type) -> None:
    machine: Any = scratch.machine
    array = np.full(size, np.finfo(dtype).max, dtype)
    assert entries.all_finite(scratch, machine.put(array))
    for at in {0, size // 2, size - 1} & set(range(size)):
        for bad in (np.nan, np.inf, -np.inf):
            broken = array.copy()
            broken[at] = bad
            assert not entries.all_finite(scratch, machine.put(broken))


@pytest.mark.parametrize("size", [0, 1, 15, 17, 65_535, 65_537, 400_000])
@by_dtype
def test_the_squared_norm_is_the_reference_s_to_the_bit(
    scratch: Scratch, size: int, dtype: type, random: np.random.Generator
) -> None:
    array = random.standard_normal(size).astype(dtype)
    got = entries.squared_norm(scratch, scratch.machine.put(array))
    assert got == reference.squared_norm(array)
