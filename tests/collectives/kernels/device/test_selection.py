"""Selection on a GPU against a sort: the sequence of launches, in every case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collectives.kernels import Momentum
from collectives.kernels.device import selection
from collectives.kernels.device.machine import Scratch
from collectives.kernels.device.selection import FEWEST_CONTENDERS, accumulate_and_select, select
from collectives.vector import SparseVector, check

TILE = 32 * 64  # elements a tile of the host's machines with 64 threads
FEW = [-2.0, -1.0, -0.5, 0.0, -0.0, 0.5, 1.0, 2.0]  # many ties and zeros
ODD = [np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38]
by_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
thresholds = st.floats(0, 3) | st.sampled_from([np.inf, np.nan, -1.0, 1e-320, 1e39, 1e300])


def keys(dense: np.ndarray) -> np.ndarray:
    """Return the bits without the sign: the order of selection."""
    unsigned = np.uint32 if dense.dtype == np.float32 else np.uint64
    return dense.view(unsigned) & (np.iinfo(unsigned).max >> 1)


def top(dense: np.ndarray, k: int) -> SparseVector:
    """Return the k largest entries by a sort: the oracle."""
    order = np.lexsort((np.arange(dense.size), -keys(dense).astype(np.int64)))
    indices = np.sort(order[keys(dense)[order] != 0][:k]).astype(np.int32)
    return SparseVector(indices, dense[indices], dense.size)


def assert_selects(scratch: Scratch, dense: np.ndarray, k: int, threshold: float = 0.0) -> float:
    """Fail unless the machine selects what the sort puts first; return the next threshold."""
    machine: Any = scratch.machine
    held = machine.put(dense)
    picked, following = select(scratch, held, k, threshold)
    assert_same(machine, picked, top(dense, k))
    assert machine.fetch(held).tobytes() == dense.tobytes()
    return following


def assert_same(machine: Any, picked: SparseVector, expected: SparseVector) -> None:
    got = SparseVector(machine.fetch(picked.indices), machine.fetch(picked.values), picked.length)
    assert got.indices.tolist() == expected.indices.tolist()
    assert got.values.tobytes() == expected.values.tobytes()
    assert got.length == expected.length
    check(got)


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    width = np.dtype(dtype).itemsize * 8
    anything = st.floats(width=width) | st.sampled_from(FEW)
    values = draw(st.sampled_from([st.sampled_from(FEW), anything]))
    return draw(arrays(dtype, draw(st.integers(1, 300)), elements=values))


@settings(max_examples=80)
@given(vectors(), st.integers(1, 300), thresholds)
def test_select_returns_the_first_k_of_a_sort(
    scratch: Scratch, dense: np.ndarray, k: int, threshold: float
) -> None:
    k = min(k, dense.size)
    following = assert_selects(scratch, dense, k, threshold)
    expected = top(dense, k)
    lowest = keys(expected.values).min() if expected.entries == k else 0
    assert type(following) is float
    assert 0 <= keys(np.array([following], dense.dtype))[0] <= lowest


@settings(max_examples=40)
@given(vectors(), st.data())
def test_select_includes_values_equal_to_the_threshold_guess(
    scratch: Scratch, dense: np.ndarray, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, dense.size))
    guess = abs(float(dense[data.draw(st.integers(0, dense.size - 1))]))
    assert_selects(scratch, dense, k, guess)


@pytest.mark.parametrize(
    "size",
    [1, 2, 3, 4, 5, 31, 32, 33, 127, 128, 129, TILE - 1, TILE, TILE + 1, 7 * TILE + 5],
)
@by_dtype
def test_select_finds_entries_at_tile_boundaries(
    scratch: Scratch, size: int, dtype: type, random: np.random.Generator
) -> None:
    dense = random.standard_normal(size).astype(dtype)
    dense[[0, -1]] = 9, -9  # at both ends
    if size > TILE:
        dense[TILE - 1 : TILE + 1] = 8, -8  # on both sides of the seam
    for k in {1, 2, max(1, size // 50), max(1, size // 3), size} & set(range(1, size + 1)):
        kth_value = float(np.abs(top(dense, k).values).min())
        for threshold in (0.0, kth_value, kth_value * 0.9, kth_value * 0.1, kth_value * 2, np.inf):
            assert_selects(scratch, dense, k, threshold)


@pytest.mark.parametrize("offset", [1, 2, 3])
@by_dtype
def test_accumulate_and_select_accepts_unaligned_vectors(
    scratch: Scratch, offset: int, dtype: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    memory = random.standard_normal(2 * TILE + 9).astype(dtype)
    gradient = random.standard_normal(memory.size - offset).astype(dtype)
    held = machine.put(memory)
    picked, _ = accumulate_and_select(scratch, held[offset:], machine.put(gradient), 99, 1.5)
    assert_same(machine, picked, top(memory[offset:] + gradient, 99))
    assert machine.fetch(held[:offset]).tobytes() == memory[:offset].tobytes()


def hostile(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Return vectors that mislead guesses, histograms or the order of ties."""
    n = 3 * TILE + 17
    noise = random.standard_normal(n).astype(np.float32)
    few = np.zeros(n, np.float32)
    few[random.choice(n, 40, replace=False)] = 1.0
    cliff = np.where(np.arange(n) % 20, 0.99, 1.01).astype(np.float32) * np.sign(noise)
    broken = noise.copy()
    broken[[3, 700, TILE]] = np.nan, -np.inf, np.inf
    ulps = np.nextafter(np.float32(1), np.float32(2)) * np.ones(n, np.float32)
    ulps[::3] = 1.0
    return {
        "all equal": np.full(n, -3.25, np.float32),
        "all the largest float": np.full(n, np.finfo(np.float32).max, np.float32),
        "all NaN": np.full(n, np.nan, np.float32),
        "all zero": np.where(np.arange(n) % 2, 0.0, -0.0).astype(np.float32),
        "few nonzeros": few,
        "ascending": np.sort(np.abs(noise)),
        "descending": np.sort(np.abs(noise))[::-1].copy(),
        "a cliff below the k-th": cliff,
        "NaN and infinities": broken,
        "one bit apart": ulps,
        "subnormal": (noise * 1e-42).astype(np.float32),
        "of every magnitude": (noise * 10.0 ** random.integers(-37, 37, n)).astype(np.float32),
    }


@pytest.mark.parametrize("name", sorted(hostile(np.random.default_rng(0))))
def test_select_is_exact_for_hostile_vectors(
    scratch: Scratch, name: str, random: np.random.Generator
) -> None:
    dense = hostile(random)[name]
    for k in (1, 60, 700, dense.size):
        threshold = 0.0
        for guess in (0.0, 1e-45, 0.5, 0.995, 1.0, 3.25, 1e30, np.inf):
            threshold = assert_selects(scratch, dense, k, guess)
        assert_selects(scratch, dense, k, threshold)  # whatever came before


def test_select_is_exact_when_candidates_overflow_their_list(
    scratch: Scratch, random: np.random.Generator
) -> None:
    # Its capacity is 8 k + 4096: with k = 10 these overflow it, and the vector is searched.
    dense = random.standard_normal(10_000).astype(np.float32)
    for guess in (0.0, 0.01, 0.3):
        assert_selects(scratch, dense, 10, guess)
    assert_selects(scratch, np.abs(dense) + 100, 10, 50.0)


def test_equal_magnitudes_pick_the_lower_index(scratch: Scratch) -> None:
    dense = np.array([1, -2, 2, -1, 3, 1], np.float32)
    for guess in (0.0, 1.0, 1.5, 2.0, 2.5, 9.0):
        picked, _ = select(scratch, scratch.machine.put(dense), 4, guess)
        assert picked.indices.tolist() == [0, 1, 2, 4]
        assert picked.values.tolist() == [1, -2, 2, 3]


def test_previous_threshold_makes_a_second_scan_unnecessary(
    on_host: Any, random: np.random.Generator
) -> None:
    """Only the first step may scan the vector twice; a word of the search's state tells."""
    scratch = Scratch(on_host())
    residual, threshold = np.zeros(40_000, np.float32), 0.0
    for step in range(6):
        gradient = random.standard_normal(residual.size).astype(np.float32)
        held = scratch.machine.put(residual)
        picked, threshold = accumulate_and_select(
            scratch, held, scratch.machine.put(gradient), 40, threshold
        )
        assert_same(scratch.machine, picked, top(residual + gradient, 40))
        residual += gradient
        residual[picked.indices] = 0
        searched_densely = scratch.array("search", selection.SEARCH_WORDS, np.uint64)[2]
        assert searched_densely == (step == 0)


@by_dtype
def test_accumulate_adds_exactly_once_for_any_threshold(
    scratch: Scratch, dtype: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    before = random.standard_normal(TILE + 77).astype(dtype)
    gradient = random.standard_normal(before.size).astype(dtype)
    for threshold in (0.0, 0.001, 2.0, 100.0):
        residual, addend = machine.put(before), machine.put(gradient)
        picked, _ = accumulate_and_select(scratch, residual, addend, 20, threshold)
        assert machine.fetch(residual).tobytes() == (before + gradient).tobytes()
        assert machine.fetch(addend).tobytes() == gradient.tobytes()
        assert_same(machine, picked, top(before + gradient, 20))


def test_accumulate_does_not_flush_subnormal_numbers(
    scratch: Scratch, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    tiny = np.finfo(np.float32).smallest_subnormal
    residual, velocity, gradient = (
        random.integers(-99, 100, TILE + 9).astype(np.float32) * tiny for _ in range(3)
    )
    held, held_velocity = machine.put(residual), machine.put(velocity)
    picked, _ = accumulate_and_select(
        scratch, held, machine.put(gradient), 40, 50 * float(tiny), Momentum(held_velocity, 0.5)
    )
    velocity = velocity * np.float32(0.5) + gradient
    assert machine.fetch(held_velocity).tobytes() == velocity.tobytes()
    assert machine.fetch(held).tobytes() == (residual + velocity).tobytes()
    assert_same(machine, picked, top(residual + velocity, 40))


def bfloat16(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 values cut to bfloat16: their bits as uint16, and the values."""
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_16_bit_gradients_are_widened_exactly(
    scratch: Scratch, kind: str, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    before = random.standard_normal(TILE + 3).astype(np.float32)
    gradient = random.standard_normal(before.size).astype(np.float32) * 1e-3
    if kind == "float16":
        sent = gradient.astype(np.float16)
        wide = sent.astype(np.float32)
    else:
        sent, wide = bfloat16(gradient)
    residual = machine.put(before)
    picked, _ = accumulate_and_select(scratch, residual, machine.put(sent), 50, 1.9)
    assert machine.fetch(residual).tobytes() == (before + wide).tobytes()
    assert_same(machine, picked, top(before + wide, 50))


@pytest.mark.parametrize(
    "sizes",
    [[1, 2, 0, 3], [TILE, 0, TILE + 4, 1, 5], [3, 2 * TILE, 0, 0], [10, 3 * TILE, 1, 1, 1, TILE]],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradient_in_parts_equals_the_joined_gradient(
    scratch: Scratch, sizes: list[int], dtype: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    parts = [random.standard_normal(size).astype(dtype) for size in sizes]
    joined = np.concatenate(parts).astype(np.float32)
    before = random.standard_normal(joined.size).astype(np.float32)
    velocity = random.standard_normal(joined.size).astype(np.float32)
    k = min(5, joined.size)
    held = [machine.put(part) for part in parts]
    for momentum in (None, Momentum(machine.put(velocity), 0.5)):
        added = joined if momentum is None else velocity * np.float32(0.5) + joined
        residual = machine.put(before)
        picked, _ = accumulate_and_select(scratch, residual, held, k, 1.0, momentum)
        assert machine.fetch(residual).tobytes() == (before + added).tobytes()
        assert_same(machine, picked, top(before + added, k))


def test_strided_gradient_is_copied_and_strided_residual_is_refused(scratch: Scratch) -> None:
    machine: Any = scratch.machine
    gradient = machine.put(np.arange(20, dtype=np.float32))[::2]
    residual = machine.zeros(10, np.float32)
    picked, _ = accumulate_and_select(scratch, residual, gradient, 2)
    assert machine.fetch(picked.values).tolist() == [16, 18]
    apart = machine.zeros(20, np.float32)[::2]
    with pytest.raises(
        ValueError, match=r"contiguous arrays, got strides \(8,\) for float32 \[10\]"
    ):
        accumulate_and_select(scratch, apart, residual, 2)
    assert not machine.fetch(apart).any()


@by_dtype
def test_accumulate_applies_momentum_correction(
    scratch: Scratch, dtype: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    size = 2 * TILE + 1
    residual, velocity = np.zeros(size, dtype), np.zeros(size, dtype)
    held, held_velocity = machine.put(residual), machine.put(velocity)
    threshold = 0.0
    for _ in range(3):
        gradient = random.standard_normal(size).astype(dtype)
        velocity = velocity * dtype(0.9) + gradient
        residual = residual + velocity
        picked, threshold = accumulate_and_select(
            scratch, held, machine.put(gradient), 30, threshold, Momentum(held_velocity, 0.9)
        )
        assert machine.fetch(held_velocity).tobytes() == velocity.tobytes()
        assert machine.fetch(held).tobytes() == residual.tobytes()
        assert_same(machine, picked, top(residual, 30))


def test_select_returns_int64_indices_for_long_vectors(
    scratch: Scratch, monkeypatch: pytest.MonkeyPatch, random: np.random.Generator
) -> None:
    # A vector of 2^31 elements is too large for a test, so `index_dtype` is replaced.
    monkeypatch.setattr(selection, "index_dtype", lambda length: np.dtype(np.int64))
    dense = random.standard_normal(5000).astype(np.float32)
    for guess in (0.0, 2.5, 9.0):
        picked, _ = select(scratch, scratch.machine.put(dense), 40, guess)
        assert picked.indices.dtype == np.int64
        assert picked.indices.tolist() == top(dense, 40).indices.tolist()


@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_outside_the_vector_is_refused(scratch: Scratch, k: int) -> None:
    dense = scratch.machine.put(np.ones(5, np.float32))
    with pytest.raises(ValueError, match=rf"k must lie in 1\.\.5 .*, got {k}"):
        select(scratch, dense, k)


@pytest.mark.parametrize(
    ("residual", "gradient", "velocity", "message"),
    [
        (np.float32, (np.float32, 3), None, r"gradient .*, float32 \[4\], got float32 \[3\]"),
        (np.float32, (np.float64, 4), None, r"gradient .*, float32 \[4\], got float64 \[4\]"),
        (np.float64, (np.float16, 4), None, r"gradient .*, float64 \[4\], got float16 \[4\]"),
        (np.float32, (np.float32, 4), (np.float64, 4), r"velocity .*, got float64 \[4\]"),
        (np.float32, (np.float32, 4), (np.float32, 5), r"velocity .*, got float32 \[5\]"),
    ],
)
def test_mismatched_arrays_are_refused_and_unchanged(
    scratch: Scratch, residual: type, gradient: Any, velocity: Any, message: str
) -> None:
    machine: Any = scratch.machine
    held = machine.put(np.zeros(4, residual))
    addend = machine.put(np.ones(gradient[1], gradient[0]))
    momentum = velocity and Momentum(machine.put(np.ones(velocity[1], velocity[0])), 0.9)
    with pytest.raises(ValueError, match=message):
        accumulate_and_select(scratch, held, addend, 1, 0.0, momentum)
    assert not machine.fetch(held).any()


def test_host_waits_once_or_twice_when_the_guess_is_far_off(
    scratch: Scratch, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    dense = machine.put(random.standard_normal(5000).astype(np.float32))
    for guess, waits in ((2.0, 1), (0.0, 2), (50.0, 2)):
        before = machine.fetched
        select(scratch, dense, 25, guess)
        assert machine.fetched == before + waits


def test_select_with_a_good_guess_takes_four_launches(
    on_host: Any, random: np.random.Generator
) -> None:
    machine = on_host()
    dense = machine.put(random.standard_normal(5000).astype(np.float32))
    select(Scratch(machine), dense, 25, 2.0)
    names = [kernel.partition("<")[0] for kernel in machine.launched]
    assert names == ["begin", "mark", "expand", "split"]


@pytest.mark.parametrize(
    "equal_count", [FEWEST_CONTENDERS, FEWEST_CONTENDERS + 1, 3 * FEWEST_CONTENDERS]
)
def test_select_ranks_many_contenders_for_the_last_place(
    scratch: Scratch, equal_count: int, random: np.random.Generator
) -> None:
    dense = np.zeros(equal_count + 900, np.float32)
    places = random.permutation(dense.size)
    dense[places[:equal_count]] = 1.0  # one bin of the marks holds them all
    dense[places[equal_count : equal_count + 500]] = 2.0
    dense[places[equal_count + 500 :]] = 1.0 + 2.0**-23
    for k in (1200, 1700, 900, 400, 2 + equal_count):
        assert_selects(scratch, dense, k, 0.9)


@pytest.mark.parametrize("offset", [0, 1])
@by_dtype
def test_sum_and_velocity_can_be_written_to_other_arrays(
    scratch: Scratch, offset: int, dtype: type, random: np.random.Generator
) -> None:
    machine: Any = scratch.machine
    size = 2 * TILE + 5
    before, gradient, velocity = (random.standard_normal(size).astype(dtype) for _ in range(3))
    residual, moving = machine.put(before), machine.put(velocity)
    room = machine.zeros(2 * size + 2 * offset, dtype)
    into, new_velocity = room[offset : offset + size], room[size + 2 * offset :][:size]
    momentum = Momentum(moving, 0.5, new_velocity)
    for guess in (0.0, 2.0):
        picked, _ = accumulate_and_select(
            scratch, residual, machine.put(gradient), 60, guess, momentum, 0.25, into
        )
        expected_velocity = velocity * dtype(0.5) + gradient * dtype(0.25)
        assert machine.fetch(residual).tobytes() == before.tobytes()
        assert machine.fetch(moving).tobytes() == velocity.tobytes()
        assert machine.fetch(new_velocity).tobytes() == expected_velocity.tobytes()
        assert machine.fetch(into).tobytes() == (before + expected_velocity).tobytes()
        assert_same(machine, picked, top(before + expected_velocity, 60))
