"""The contract of the hot loops, for every twin: against a sort, and against plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collectives import SparseVector, accumulate_and_select, kernels, merge, select
from collectives.kernels import (
    Momentum,
    add_at,
    all_finite,
    clear_at,
    contains,
    host,
    in_use,
    put_at,
    reference,
    squared_norm,
    sum_by_index,
    why_not_compiled,
)
from collectives.kernels.host.library import load_error
from collectives.vector import check

FEW = [-2.0, -1.0, -0.5, 0.0, -0.0, 0.5, 1.0, 2.0]  # many ties, zeros, and sums that cancel
NOT_FINITE = [np.nan, np.inf, -np.inf]
SEAM = 2048  # a block of the C++ core; of the reference 128 chunks

dtypes = st.sampled_from([np.float32, np.float64])
by_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        reference,
        pytest.param(host, marks=pytest.mark.skipif(bool(load_error()), reason=load_error())),
    ],
    ids=["reference", "host"],
)
def _twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with every twin; with small chunks, so that short arrays span many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_for_numpy", request.param)
        patch.setattr(reference, "CHUNK", 16)
        yield


def elements(dtype: type) -> st.SearchStrategy[float]:
    """Return values of all magnitudes, subnormal and huge, but no two whose sum overflows."""
    bound = float(np.finfo(dtype).max) / 4
    width = np.dtype(dtype).itemsize * 8
    if width == 32:
        bound = float(np.float32(bound))
    return st.floats(-bound, bound, width=width) | st.sampled_from(FEW)


@st.composite
def vectors(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> np.ndarray:
    dtype, size = draw(dtypes), draw(sizes)
    some = [st.sampled_from(FEW), elements(dtype), st.sampled_from(FEW + NOT_FINITE)]
    return draw(arrays(dtype, size, elements=draw(st.sampled_from(some))))


@st.composite
def sparse_pairs(draw: st.DrawFn) -> tuple[SparseVector, SparseVector]:
    """Return two vectors of one length and dtype, without explicit zeros; often overlapping."""
    dtype, length = draw(dtypes), draw(st.integers(1, 40))
    values = draw(st.sampled_from([st.sampled_from(FEW), elements(dtype)]))
    a, b = (draw(arrays(dtype, length, elements=values, fill=st.just(0.0))) for _ in range(2))
    return SparseVector.from_dense(a), SparseVector.from_dense(b)


def in_order(dense: np.ndarray) -> np.ndarray:
    """Return the positions of the nonzeros: NaN, the larger |value|, then the lower index first."""
    order = np.lexsort((np.arange(dense.size), -np.abs(dense), ~np.isnan(dense)))
    return order[dense[order] != 0]


def bits(values: np.ndarray) -> bytes:
    """Return the bits to compare, without the sign of NaN."""
    return np.where(np.isnan(values), np.abs(values), values).tobytes()


def top(dense: np.ndarray, k: int) -> SparseVector:
    """Return the k largest entries by a sort: the oracle."""
    indices = np.sort(in_order(dense)[:k]).astype(np.int32)
    return SparseVector(indices, dense[indices], dense.size)


def assert_same(a: SparseVector, b: SparseVector) -> None:
    assert a.indices.tolist() == b.indices.tolist()
    assert bits(a.values) == bits(b.values)
    assert a.length == b.length
    assert a.values.dtype == b.values.dtype
    check(a)


def read_only(*parts: np.ndarray | SparseVector) -> None:
    """Make writes to these arrays fail."""
    for part in parts:
        for array in (part.indices, part.values) if isinstance(part, SparseVector) else (part,):
            array.setflags(write=False)


sizes = st.integers(1, 200)
thresholds = st.floats(0, 3) | st.sampled_from([np.inf, np.nan, -1.0, 1e-320, 1e39, 1e300])


# ---- select


@settings(max_examples=50)
@given(vectors(sizes), st.integers(1, 200), thresholds)
def test_select_returns_the_first_k_of_a_sort(dense: np.ndarray, k: int, threshold: float) -> None:
    k = min(k, dense.size)
    read_only(dense)
    picked, _ = select(dense, k, threshold)
    assert_same(picked, top(dense, k))


@settings(max_examples=50)
@given(vectors(sizes), st.integers(1, 200), thresholds)
def test_next_threshold_is_at_most_the_kth_value(
    dense: np.ndarray, k: int, threshold: float
) -> None:
    k = min(k, dense.size)
    picked, following = select(dense, k, threshold)
    lowest = np.abs(picked.values).min() if picked.entries == k else 0.0
    assert 0.0 <= following < np.inf
    assert np.isnan(lowest) or following <= lowest
    assert type(following) is float


@settings(max_examples=50)
@given(vectors(sizes), st.data())
def test_select_includes_values_equal_to_the_threshold_guess(
    dense: np.ndarray, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, dense.size))
    guess = float(np.abs(dense[data.draw(st.integers(0, dense.size - 1))]))
    assert_same(select(dense, k, guess)[0], top(dense, k))


def test_equal_magnitudes_pick_the_lower_index() -> None:
    picked, _ = select(np.array([1, -2, 2, -1, 2, 1], np.float32), 2)
    assert picked.indices.tolist() == [1, 2]
    picked, _ = select(np.array([1, -2, 2, -1, 3, 1], np.float32), 4)
    assert picked.indices.tolist() == [0, 1, 2, 4]
    assert picked.values.tolist() == [1, -2, 2, 3]


def test_zeros_are_never_selected() -> None:
    picked, threshold = select(np.array([0, -0.0, 5e-324, 0], np.float64), 3)
    assert picked.indices.tolist() == [2]
    assert threshold == 0.0
    nothing, threshold = select(np.zeros(4, np.float32), 4, threshold=1.0)
    assert nothing.entries == 0
    assert threshold == 0.0


@by_dtype
def test_select_orders_largest_and_smallest_floats(dtype: type) -> None:
    info = np.finfo(dtype)
    dense = np.array([info.smallest_subnormal, info.tiny, info.max, -info.max], dtype)
    for k in range(1, 5):
        assert_same(select(dense, k)[0], top(dense, k))


@pytest.mark.parametrize("size", [SEAM - 1, SEAM, SEAM + 1, 2 * SEAM, 2 * SEAM + 1])
@by_dtype
def test_select_finds_entries_at_chunk_boundaries(
    size: int, dtype: type, random: np.random.Generator
) -> None:
    dense = random.standard_normal(size).astype(dtype)
    dense[[0, -1]] = 9, -9  # at both ends
    if size > SEAM:
        dense[SEAM - 1 : SEAM + 1] = 8, -8  # on both sides of the seam
    for k in (1, 2, 700, size // 3, size):
        expected = top(dense, k)
        for threshold in (0.0, float(np.abs(expected.values).min()), 0.01, 100.0):
            assert_same(select(dense, k, threshold)[0], expected)


@pytest.mark.parametrize(
    "order", [np.sort, lambda a: np.sort(a)[::-1].copy()], ids=["ascending", "descending"]
)
def test_pruning_sorted_vectors_loses_no_entry(
    order: Callable[[np.ndarray], np.ndarray], random: np.random.Generator
) -> None:
    dense = order(random.random(20 * SEAM).astype(np.float32))
    for k in (3, 1000):
        for threshold in (0.0, 1e-3, 0.5):
            assert_same(select(dense, k, threshold)[0], top(dense, k))


@pytest.mark.parametrize("value", [1.0, np.finfo(np.float32).max])
def test_pruning_keeps_the_first_of_equal_entries(value: float) -> None:
    dense = np.full(3 * SEAM, value, np.float32)
    dense[5] = 0
    picked, _ = select(dense, 6)
    assert picked.indices.tolist() == [0, 1, 2, 3, 4, 6]


def test_misleading_sample_loses_no_entry(random: np.random.Generator) -> None:
    # k = 1000 samples every 15th value; only those are large, so the guess is far too high.
    dense = random.standard_normal(100_000).astype(np.float32)
    dense[::15] *= 1000
    for k in (1000, 10_000):
        assert_same(select(dense, k)[0], top(dense, k))
    # Now every value but the sampled ones is large, so the guess is far too low.
    dense = random.standard_normal(100_000).astype(np.float32) * 1000
    dense[::15] /= 1000
    assert_same(select(dense, 1000)[0], top(dense, 1000))


@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_outside_the_vector_is_refused(k: int) -> None:
    dense = np.ones(5, np.float32)
    for call in (lambda: select(dense, k), lambda: accumulate_and_select(dense, dense, k)):
        with pytest.raises(ValueError, match=rf"k must lie in 1\.\.5 .*, got {k}"):
            call()
    assert dense.tolist() == [1] * 5


SWAPPED = [np.dtype(dtype).newbyteorder() for dtype in (np.float32, np.float64)]


@pytest.mark.parametrize("dtype", [*SWAPPED, *map(np.dtype, (np.float16, np.int32, np.int64))])
def test_vectors_of_other_dtypes_or_byte_orders_are_refused_and_unchanged(
    dtype: np.dtype[Any],
) -> None:
    dense = np.arange(5).astype(dtype)
    for call in (lambda: select(dense, 2), lambda: accumulate_and_select(dense, dense.copy(), 2)):
        with pytest.raises(ValueError, match=rf"float32 or float64, got {dtype}: \.astype\("):
            call()
    assert dense.tolist() == [0, 1, 2, 3, 4]


def test_multidimensional_vector_is_refused() -> None:
    dense = np.ones((2, 3), np.float32)
    for call in (lambda: select(dense, 2), lambda: accumulate_and_select(dense, dense.copy(), 2)):
        with pytest.raises(ValueError, match=r"one-dimensional .*, got \[2, 3\]: .*reshape"):
            call()
    assert dense.tolist() == [[1] * 3] * 2


@pytest.mark.parametrize("what", [torch.ones(4), [1.0] * 4], ids=["tensor", "list"])
def test_arguments_that_are_not_arrays_are_refused_with_advice(what: Any) -> None:
    residual = np.zeros(4, np.float32)
    vector = SparseVector(what, what, 4)
    for call in (
        lambda: select(what, 1),
        lambda: accumulate_and_select(what, residual, 1),
        lambda: accumulate_and_select(residual, what, 1),
        lambda: accumulate_and_select(residual, [what], 1),
        lambda: merge(vector, vector, 1),
    ):
        with pytest.raises(TypeError, match=r"NumPy's or CuPy's, got .*tensor\.numpy\(\), np\.arr"):
            call()
    assert not residual.any()


# ---- accumulate and select


@settings(max_examples=80)
@given(vectors(sizes), st.integers(1, 200), thresholds, st.randoms(use_true_random=False))
def test_accumulate_adds_exactly_once_for_any_threshold(
    residual: np.ndarray, k: int, threshold: float, shuffler
) -> None:
    k = min(k, residual.size)
    gradient = np.array(shuffler.sample(residual.tolist(), residual.size), residual.dtype)
    read_only(gradient)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        expected = residual + gradient
    with np.errstate(invalid="ignore"):
        picked, following = accumulate_and_select(residual, gradient, k, threshold)
    assert bits(residual) == bits(expected)
    assert_same(picked, top(expected, k))
    assert following == select(expected, k, threshold)[1]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("size", [1, SEAM - 1, SEAM + 1, 2 * SEAM])
def test_gradient_of_another_size_is_refused_and_residual_unchanged(
    size: int, threshold: float
) -> None:
    residual = np.zeros(SEAM, np.float32)
    with pytest.raises(ValueError, match=rf"float32 \[{SEAM}\].*float32 \[{size}\]"):
        accumulate_and_select(residual, np.ones(size, np.float32), 1, threshold)
    assert not residual.any()


def test_gradient_of_another_dtype_is_refused_and_residual_unchanged() -> None:
    residual = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"float32 \[4\].*float64 \[4\]"):
        accumulate_and_select(residual, np.ones(4), 1)
    assert not residual.any()


@settings(max_examples=80)
@given(
    vectors(sizes),
    st.integers(1, 200),
    st.data(),
    st.sampled_from([None, 0.9]),
    st.booleans(),
    st.booleans(),
)
def test_gradient_in_parts_equals_the_joined_gradient(
    gradient: np.ndarray,
    k: int,
    data: st.DataObject,
    factor: float | None,
    apart: bool,
    beside: bool,
) -> None:
    k, dtype = min(k, gradient.size), gradient.dtype
    cuts = sorted(data.draw(st.lists(st.integers(0, gradient.size), max_size=5)))
    parts = np.split(gradient, cuts)
    if apart:  # every second element of an array, as a transposed parameter's gradient may be
        parts = [np.repeat(part, 2)[::2] for part in parts]
    residual = data.draw(arrays(dtype, gradient.size, elements=st.sampled_from(FEW)))
    momentum = None
    before, expected, velocity = residual.copy(), residual.copy(), residual[::-1].copy()
    into = np.full_like(residual, 7) if beside else None
    with np.errstate(invalid="ignore"):
        if factor is not None:
            velocity_into = np.full_like(velocity, 7) if beside else None
            momentum = Momentum(velocity.copy(), factor, velocity_into)
            old_velocity = velocity.copy()
            velocity *= factor
            velocity += gradient
        expected += gradient if factor is None else velocity
        picked, _ = accumulate_and_select(residual, parts, k, 0.3, momentum, 1.0, into)
    assert bits(residual if into is None else into) == bits(expected)
    if momentum is not None:
        written = momentum.velocity if momentum.into is None else momentum.into
        assert bits(written) == bits(velocity)
    if into is not None:  # then the old arrays are unchanged
        assert bits(residual) == bits(before)
        assert momentum is None or bits(momentum.velocity) == bits(old_velocity)
    assert_same(picked, top(expected, k))


def test_every_16_bit_gradient_value_is_widened_exactly() -> None:
    everything = np.arange(1 << 16, dtype=np.uint16)
    halves = everything.view(np.float16)
    with np.errstate(invalid="ignore"):
        exact = [halves.astype(np.float32), (everything.astype(np.uint32) << 16).view(np.float32)]
    for gradient, expected in zip((halves, everything), exact, strict=True):
        residual = np.zeros(expected.size, np.float32)
        with np.errstate(invalid="ignore"):
            picked, _ = accumulate_and_select(residual, gradient, 40_000, 0.1)
        assert np.array_equal(residual, expected, equal_nan=True)
        assert np.array_equal(picked.values, expected[picked.indices], equal_nan=True)


@settings(max_examples=50)
@given(
    vectors(sizes),
    st.sampled_from([0.5, 1 / 3, 1 / 7, -2.0]),
    st.sampled_from([None, 0.9]),
    st.sampled_from(["same", "fp16", "bf16"]),
    st.integers(1, 50),
)
def test_weight_multiplies_the_gradient_before_momentum_and_sum(
    gradient: np.ndarray, weight: float, factor: float | None, form: str, cut: int
) -> None:
    if form != "same" and gradient.dtype == np.float32:
        with np.errstate(over="ignore"):
            narrow = gradient.astype(np.float16)
        gradient = narrow.astype(np.float32)
        if form == "bf16":
            narrow = (gradient.view(np.uint32) >> 16).astype(np.uint16)
            gradient = (narrow.astype(np.uint32) << 16).view(np.float32)
    else:
        narrow = gradient
    residual, velocity = gradient[::-1].copy(), gradient.copy()
    momentum = None if factor is None else Momentum(velocity.copy(), factor)
    with np.errstate(invalid="ignore", over="ignore"):
        added = gradient * gradient.dtype.type(weight)
        if factor is not None:
            added = velocity * gradient.dtype.type(factor) + added
        expected = residual + added
        parts = np.split(narrow, [min(cut, narrow.size)])
        picked, _ = accumulate_and_select(residual, parts, 1, 0.0, momentum, weight)
    assert bits(residual) == bits(expected)
    assert momentum is None or bits(momentum.velocity) == bits(added)
    assert_same(picked, top(expected, 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_put_at_writes_entries_into_the_parts_of_a_vector(dtype: type) -> None:
    parts = [np.full(size, 7, dtype) for size in (3, 0, 1, 5)]
    values = np.array([0.1, -1e9, 2, np.nan], np.float64 if dtype == np.float64 else np.float32)
    put_at(parts, SparseVector(np.array([0, 2, 3, 8], np.int32), values, 9))
    with np.errstate(over="ignore"):
        expected = np.full(9, 7, dtype)
        expected[[0, 2, 3, 8]] = values
    assert np.array_equal(np.concatenate(parts), expected, equal_nan=True)
    with pytest.raises(ValueError, match=r"the parts must be .* \[9\], got float\d\d \[8\]"):
        put_at([np.zeros(8, dtype)], SparseVector.from_dense(np.zeros(9, values.dtype)))


def test_put_at_rounds_bfloat16_entries_to_nearest() -> None:
    part = np.zeros(4, np.uint16)
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -np.inf, 1e-45], np.float32)  # ties go to even
    put_at([part], SparseVector(np.arange(4, dtype=np.int32), values, 4))
    assert part.tolist() == [0x3F80, 0x3F82, 0xFF80, 0]


def test_mismatched_arguments_are_refused_and_unchanged() -> None:
    residual, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    wrong = [
        [ones[:2], ones[:3]],
        [ones[:2], np.ones(2)],
        [],
        [ones[:2].astype(np.float16), ones[2:]],
        ones.astype(np.int32),
        *(ones.astype(dtype).astype(np.dtype(dtype).newbyteorder()) for dtype in "feH"),
    ]
    for gradient in wrong:
        with pytest.raises(ValueError, match=r"the gradient must be .* float32 \[4\], got "):
            accumulate_and_select(residual, gradient, 1)
    with pytest.raises(ValueError, match=r"float64 \[4\], got float16"):
        accumulate_and_select(np.zeros(4), ones.astype(np.float16), 1)
    for gradient in (ones.reshape(2, 2), [ones[:2], ones[2:].reshape(2, 1)]):
        with pytest.raises(ValueError, match=r"the gradient must be .* one-dimensional, got \[2, "):
            accumulate_and_select(residual, gradient, 1)
    with pytest.raises(ValueError, match=r"the parts must be .* one-dimensional, got \[2, 2\]"):
        put_at([residual.reshape(2, 2)], SparseVector.from_dense(ones))
    for velocity in (np.ones(4), np.ones(3, np.float32), ones.astype(SWAPPED[0])):
        with pytest.raises(ValueError, match=r"the velocity must be .* float32 \[4\], got "):
            accumulate_and_select(residual, ones, 1, momentum=Momentum(velocity, 0.9))
    assert not residual.any()


READ_ONLY = ["residual", "sum", "velocity", "new velocity"]


@pytest.mark.parametrize("what", READ_ONLY)
def test_accumulate_writes_nothing_when_an_array_is_read_only(what: str) -> None:
    """Not even the other arrays: residual and velocity must be of the same step."""
    residual, beside, velocity, new_velocity = np.zeros((4, 4), np.float32)
    given = dict(zip(READ_ONLY, (residual, beside, velocity, new_velocity), strict=True))
    read_only(given[what])
    momentum = Momentum(velocity, 0.9, new_velocity if what == "new velocity" else None)
    into = beside if what == "sum" else None
    with pytest.raises(ValueError, match="read-only"):
        accumulate_and_select(residual, np.ones(4, np.float32), 1, 0.0, momentum, into=into)
    assert not any(array.any() for array in given.values())


def test_read_only_residual_is_accepted_with_a_separate_output() -> None:
    residual, beside = np.zeros((2, 4), np.float32)
    read_only(residual)
    accumulate_and_select(residual, np.ones(4, np.float32), 1, into=beside)
    assert beside.tolist() == [1] * 4


def test_put_at_writes_nothing_when_a_part_is_read_only() -> None:
    parts = list(np.zeros((2, 4), np.float32))
    read_only(parts[1])
    with pytest.raises(ValueError, match="read-only"):
        put_at(parts, SparseVector.from_dense(np.ones(8, np.float32)))
    assert not parts[0].any()


def test_momentum_factor_is_rounded_to_the_vectors_dtype(random: np.random.Generator) -> None:
    velocity = random.standard_normal(9999).astype(np.float32)
    expected = velocity * np.float32(0.9)
    residual = np.zeros(velocity.size, np.float32)
    momentum = Momentum(velocity, np.float64(0.9))
    accumulate_and_select(residual, np.zeros_like(residual), 1, momentum=momentum)
    assert residual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_kernels_accept_strided_arrays(threshold: float) -> None:
    wide = np.zeros(20, np.float64)
    residual, gradient = wide[::2], np.arange(20.0)[::2]
    velocity = np.ones(20)[::2]
    picked, _ = accumulate_and_select(residual, gradient, 2, threshold, Momentum(velocity, 0.5))
    assert residual.tolist() == velocity.tolist() == [0.5 + value for value in gradient]
    assert not wide[1::2].any()
    assert picked.indices.tolist() == [8, 9]
    assert select(gradient, 2, threshold)[0].indices.tolist() == [8, 9]
    add_at(residual, picked)
    clear_at(residual, np.array([0], np.int32))
    assert residual.tolist() == [0, *(0.5 + gradient[1:8]), 33, 37]
    assert squared_norm(gradient) == (gradient**2).sum()
    assert all_finite(gradient)


# ---- merge


@settings(max_examples=50)
@given(sparse_pairs(), st.integers(1, 50))
def test_merge_keeps_the_k_largest_of_the_sum(
    pair: tuple[SparseVector, SparseVector], k: int
) -> None:
    read_only(*pair)
    a, b = pair
    assert_same(merge(a, b, k), top(a.to_dense() + b.to_dense(), k))


@settings(max_examples=80)
@given(sparse_pairs(), st.integers(1, 50))
def test_merge_is_commutative_to_the_bit(pair: tuple[SparseVector, SparseVector], k: int) -> None:
    a, b = pair
    assert_same(merge(a, b, k), merge(b, a, k))


@pytest.mark.parametrize("k", [0, -1])
def test_merge_refuses_k_below_one(k: int) -> None:
    vector = SparseVector.from_dense(np.ones(4, np.float32))
    with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
        merge(vector, vector, k)


def test_merge_refuses_vectors_of_different_lengths_or_dtypes() -> None:
    vector = SparseVector.from_dense(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="vectors must be of one length, got 4 and 5"):
        merge(vector, vector._replace(length=5), 2)
    for dtype in (SWAPPED[0], np.dtype(np.float16)):
        other = vector._replace(values=vector.values.astype(dtype))
        for pair in ((vector, other), (other, vector)):
            with pytest.raises(ValueError, match=rf"float32 or float64, got {dtype}: \.astype\("):
                merge(*pair, 2)
    wide = vector._replace(values=vector.values.astype(np.float64))
    long = vector._replace(indices=vector.indices.astype(np.int64))
    for other, dtypes in ((wide, "float64 at int32"), (long, "float32 at int64")):
        for call in (
            lambda other=other: merge(vector, other, 2),
            lambda other=other: sum_by_index([vector, other]),
        ):
            with pytest.raises(ValueError, match=f"one dtype, got .*{dtypes}"):
                call()
    with pytest.raises(ValueError, match="vectors must be of one length, got 4 and 5"):
        sum_by_index([vector, vector._replace(length=5), vector])


@pytest.mark.parametrize("k", [2**63 - 1, 2**63, 2**64, 2**64 + 1])
def test_merge_accepts_k_beyond_64_bits(k: int) -> None:
    vector = SparseVector.from_dense(np.arange(1, 6001, dtype=np.float32))
    assert merge(vector, vector, k).entries == 6000


def test_merge_is_not_associative() -> None:
    # Why every rank must merge in the same tree.
    a, b, c = (
        SparseVector(np.array([index], np.int32), np.array([value], np.float32), 9)
        for index, value in ((5, 1.0), (7, 2.0), (5, 1.5))
    )
    assert merge(merge(a, b, 1), c, 1).indices.tolist() == [7]
    assert merge(a, merge(b, c, 1), 1).indices.tolist() == [7]
    assert merge(merge(a, c, 1), b, 1).indices.tolist() == [5]


# ---- operations on entries and whole vectors


@settings(max_examples=60)
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.sampled_from("il"))
def test_contains_equals_set_membership(held: set[int], wanted: set[int], code: str) -> None:
    a, b = (np.array(sorted(part), code) for part in (held, wanted))
    read_only(a, b)
    found = contains(a, b)
    assert found.dtype == np.bool_
    assert found.tolist() == [index in held for index in sorted(wanted)]


@settings(max_examples=50)
@given(sparse_pairs())
def test_add_at_equals_adding_the_dense_form(pair: tuple[SparseVector, SparseVector]) -> None:
    dense, addend = pair[0].to_dense(), pair[1]
    read_only(addend)
    expected = dense + addend.to_dense()
    add_at(dense, addend)
    assert np.array_equal(dense, expected)


@settings(max_examples=50)
@given(sparse_pairs())
def test_clear_at_leaves_other_entries_unchanged(pair: tuple[SparseVector, SparseVector]) -> None:
    dense, indices = pair[0].to_dense(), pair[1].indices
    read_only(indices)
    expected = np.where(np.isin(np.arange(dense.size), indices), 0, dense)
    clear_at(dense, indices)
    assert dense.tobytes() == expected.tobytes()


@settings(max_examples=50)
@given(vectors(st.integers(0, 100)))
def test_squared_norm_equals_the_reference_to_the_bit(dense: np.ndarray) -> None:
    read_only(dense)
    with np.errstate(over="ignore"):
        expected = reference.squared_norm(dense)
        norm = squared_norm(dense)
        assert np.array_equal(norm, expected, equal_nan=True)
        assert np.allclose(norm, np.square(dense, dtype=np.float64).sum(), equal_nan=True)


@by_dtype
def test_squared_norm_of_a_long_vector_equals_the_reference(
    dtype: type, random: np.random.Generator
) -> None:
    dense = random.standard_normal(3 * reference.NORM_CHUNK + 21).astype(dtype)
    assert squared_norm(dense) == reference.squared_norm(dense)
    assert squared_norm(dense) == pytest.approx(dense.astype(np.float64) @ dense)


@settings(max_examples=50)
@given(st.integers(0, 70), st.data(), dtypes, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_all_finite_detects_one_non_finite_value_anywhere(
    size: int, data: st.DataObject, dtype: type, bad: float
) -> None:
    array = np.full(size, np.finfo(dtype).max, dtype)
    read_only(array)
    assert all_finite(array)
    if size:
        at = data.draw(st.integers(0, size - 1))
        assert not all_finite(np.where(np.arange(size) == at, dtype(bad), array))


def test_all_finite_detects_non_finite_16_bit_floats() -> None:
    everything = np.arange(1 << 16, dtype=np.uint16)
    for array, infinity in ((everything.view(np.float16), 0x7C00), (everything, 0x7F80)):
        finite = everything & 0x7FFF < infinity
        assert all_finite(array[finite])
        for number in everything[~finite].tolist():
            assert not all_finite(array[number : number + 1])


@pytest.mark.parametrize("at", [0, SEAM - 1, SEAM, 2 * SEAM])
def test_all_finite_detects_nan_at_chunk_boundaries(at: int) -> None:
    array = np.zeros(2 * SEAM + 1, np.float32)
    array[at] = np.nan
    assert not all_finite(array)


def in_turn(dense: list[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays, one addition after the other."""
    total = np.zeros_like(dense[0])
    for array in dense:
        total += array
    return total


@settings(max_examples=60)
@given(st.data(), dtypes, st.integers(1, 20), st.integers(1, 20))
def test_sum_by_index_adds_in_list_order(
    data: st.DataObject, dtype: type, length: int, count: int
) -> None:
    values = st.sampled_from(FEW) | st.floats(-(2.0**100), 2.0**100, width=32)
    dense = [data.draw(arrays(dtype, length, elements=values)) for _ in range(count)]
    lists = [SparseVector.from_dense(array) for array in dense]
    read_only(*lists)
    assert_same(sum_by_index(lists), SparseVector.from_dense(in_turn(dense)))


def test_sum_by_index_of_many_lists_is_not_reordered() -> None:
    # From eight addends on NumPy's reductions add pairwise; here 1 vanishes in 1e8 each time.
    dense = [np.array([value], np.float32) for value in [1e8] + [1.0] * 20]
    assert in_turn(dense).tolist() == [1e8]
    assert sum_by_index([SparseVector.from_dense(array) for array in dense]).values == [1e8]


def test_in_use_names_the_kernels() -> None:
    assert in_use().startswith("NumPy reference" if why_not_compiled() else "C++ core, ")


# ---- bugs of other implementations


def test_merge_returns_a_shared_index_once_for_k_beyond_the_nonzeros() -> None:
    # An implementation summed into one list and left a zero under the same index in the other;
    # the zero twin was selected, and the last writer of that index won.
    a = SparseVector(np.array([1, 4], np.int32), np.array([1, 2], np.float32), 9)
    b = SparseVector(np.array([4, 6], np.int32), np.array([-2, 3], np.float32), 9)
    assert merge(a, b, 9).indices.tolist() == [1, 6]


def test_candidates_above_the_threshold_are_cut_by_magnitude() -> None:
    # An implementation kept the first k of those over its threshold.
    dense = np.arange(1, 101, dtype=np.float32)
    picked, _ = select(dense, 10, threshold=50.0)
    assert picked.indices.tolist() == list(range(90, 100))


def test_select_keeps_the_sign_of_values() -> None:
    picked, _ = select(np.array([-3, 1, -2], np.float32), 2)
    assert picked.values.tolist() == [-3, -2]


def test_select_leaves_the_global_random_state_unchanged() -> None:
    before = np.random.get_state()[1].tobytes()
    select(np.ones(10 * SEAM, np.float32), 1000)
    assert np.random.get_state()[1].tobytes() == before


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("at", [0, 5, 1 << 14, (1 << 16) - 1, 1 << 16, (1 << 16) + 29])
def test_all_finite_detects_infinity_at_block_boundaries(at: int, dtype: type) -> None:
    array = np.full((1 << 16) + 30, np.finfo(dtype).max, dtype)
    assert all_finite(array)
    array[at] = -np.inf
    assert not all_finite(array)
