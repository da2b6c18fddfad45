"""Single entries and whole vectors on a GPU against the NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.kernels import put_at, reference
from collectives.kernels.device import entries
from collectives.kernels.device.machine import Scratch
from collectives.vector import SparseVector

by_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@settings(max_examples=40)
@given(st.sets(st.integers(0, 300)), st.sets(st.integers(0, 300)), st.sampled_from("il"))
def test_contains_equals_set_membership(
    scratch: Scratch, held: set[int], wanted: set[int], code: str
) -> None:
    machine: Any = scratch.machine
    a, b = (machine.put(np.array(sorted(part), code)) for part in (held, wanted))
    found = machine.fetch(entries.contains(scratch, a, b))
    assert found.dtype == np.bool_
    assert found.tolist() == [index in held for index in sorted(wanted)]


@pytest.mark.parametrize("count", [0, 1, 5000])
@by_dtype
def test_add_at_and_clear_at_equal_the_reference(
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

    held = machine.put(np.ones(9000, dtype))
    entries.clear_at(scratch, held, at)
    assert machine.fetch(held).sum() == 9000 - count


@pytest.mark.parametrize("element", [np.float32, np.float64, np.float16, np.uint16])
def test_put_at_writes_entries_of_many_arrays_as_on_the_host(
    scratch: Scratch, element: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    parts = [np.full(size, 3, element) for size in (1, 0, 700, 31, 5000, 2)]
    length = sum(part.size for part in parts)
    real = np.float64 if element == np.float64 else np.float32
    indices = np.sort(random.choice(length, 900, replace=False)).astype(np.int32)
    values = random.standard_normal(900).astype(real)
    values[:4] = [np.inf, -np.inf, 1e-41, 65519.0]
    held = [machine.put(part) for part in parts]
    vector = SparseVector(machine.put(indices), machine.put(values), length)
    entries.put_at(scratch, held, vector)
    put_at(parts, SparseVector(indices, values, length))
    for part, expected in zip(held, parts, strict=True):
        assert machine.fetch(part).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("form", "infinity"), [(np.float16, 0x7C00), (np.uint16, 0x7F80)])
def test_all_finite_detects_non_finite_16_bit_floats(
    scratch: Scratch, form: type, infinity: int
) -> None:
    machine: Any = scratch.machine
    array = np.full(1001, infinity - 1, np.uint16)
    assert entries.all_finite(scratch, machine.put(array.view(form)))
    array[640] = infinity | 0x8000
    assert not entries.all_finite(scratch, machine.put(array.view(form)))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 700, 20_001])
@by_dtype
def test_all_finite_detects_one_non_finite_value_anywhere(
    scratch: Scratch, size: int, dtype: type
) -> None:
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
def test_squared_norm_equals_the_reference_to_the_bit(
    scratch: Scratch, size: int, dtype: type, random: np.random.Generator
) -> None:
    array = random.standard_normal(size).astype(dtype)
    got = entries.squared_norms(scratch, [scratch.machine.put(array)])[0]
    assert got == reference.squared_norm(array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_squared_norms_of_many_arrays_take_one_copy_to_the_host(
    scratch: Scratch, dtype: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    sizes = [0, 70_000, 1, 0, 0, 65_536, 3, 0]
    arrays = [random.standard_normal(size).astype(dtype) for size in sizes]
    expected = [reference.squared_norm(array.astype(np.float32)) for array in arrays]
    before = machine.fetched
    assert entries.squared_norms(scratch, [machine.put(array) for array in arrays]) == expected
    assert machine.fetched == before + 1
    assert entries.squared_norms(scratch, [machine.put(arrays[0])] * 2) == [0.0, 0.0]


def test_subnormal_numbers_are_not_flushed_to_zero(scratch: Scratch) -> None:
    machine: Any = scratch.machine
    tiny = np.finfo(np.float32).smallest_subnormal
    dense = np.full(100, tiny)
    indices = np.arange(0, 100, 3, dtype=np.int32)
    values = np.arange(indices.size).astype(np.float32) * tiny
    held = machine.put(dense)
    entries.add_at(
        scratch, held, SparseVector(machine.put(indices), machine.put(values), dense.size)
    )
    dense[indices] += values
    assert machine.fetch(held).tobytes() == dense.tobytes()
    assert entries.squared_norms(scratch, [held]) == [reference.squared_norm(dense)]
