"""The hot loops against a sort, and against plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collectives import SparseVector, accumulate_and_select, merge, select
from collectives.kernels import (
    add_at,
    all_finite,
    contains,
    in_use,
    reference,
    sum_by_index,
    why_not_compiled,
)
from collectives.vector import check

CHUNK = reference.CHUNK
FEW = [-2.0, -1.0, -0.5, 0.0, -0.0, 0.5, 1.0, 2.0]  # many ties, zeros, and sums that cancel

dtypes = st.sampled_from([np.float32, np.float64])
by_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def elements(dtype: type) -> st.SearchStrategy[float]:
    """Return values of all magnitudes, denormal and huge; no two of them overflow when added."""
    bound = float(np.finfo(dtype).max) / 4
    width = np.dtype(dtype).itemsize * 8
    if width == 32:
        bound = float(np.float32(bound))
    return st.floats(-bound, bound, width=width) | st.sampled_from(FEW)


@st.composite
def vectors(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> np.ndarray:
    dtype, size = draw(dtypes), draw(sizes)
    values = draw(st.sampled_from([st.sampled_from(FEW), elements(dtype)]))
    return draw(arrays(dtype, size, elements=values))


@st.composite
def sparse_pairs(draw: st.DrawFn) -> tuple[SparseVector, SparseVector]:
    """Return two vectors of one length and dtype, without explicit zeros; often overlapping."""
    dtype, length = draw(dtypes), draw(st.integers(1, 40))
    values = draw(st.sampled_from([st.sampled_from(FEW), elements(dtype)]))
    a, b = (draw(arrays(dtype, length, elements=values, fill=st.just(0.0))) for _ in range(2))
    return SparseVector.from_dense(a), SparseVector.from_dense(b)


def in_order(dense: np.ndarray) -> np.ndarray:
    """Return the positions of the nonzeros: the larger |value| first, then the lower index."""
    order = np.lexsort((np.arange(dense.size), -np.abs(dense)))
    return order[dense[order] != 0]


def top(dense: np.ndarray, k: int) -> SparseVector:
    """Return the k largest entries by a sort: the oracle."""
    indices = np.sort(in_order(dense)[:k]).astype(np.int32)
    return SparseVector(indices, dense[indices], dense.size)


def rest(dense: np.ndarray, k: int) -> SparseVector:
    """Return the nonzero entries that `top` leaves."""
    indices = np.sort(in_order(dense)[k:]).astype(np.int32)
    return SparseVector(indices, dense[indices], dense.size)


def assert_same(a: SparseVector, b: SparseVector) -> None:
    assert a.indices.tolist() == b.indices.tolist()
    assert a.values.tobytes() == b.values.tobytes()
    assert a.length == b.length
    assert a.values.dtype == b.values.dtype
    check(a)


def read_only(*parts: np.ndarray | SparseVector) -> None:
    """Make whoever writes to these arrays fail."""
    for part in parts:
        for array in (part.indices, part.values) if isinstance(part, SparseVector) else (part,):
            array.setflags(write=False)


def watched(method: str) -> AbstractContextManager[mock.Mock]:
    """Count the calls of a method of the search, which does its work as ever."""
    original = getattr(reference._Search, method)
    return mock.patch.object(reference._Search, method, autospec=True, side_effect=original)


@pytest.fixture(scope="module")
def _small_chunks() -> Iterator[None]:
    """Let a short array span many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK", 16)
        yield


small_chunks = pytest.mark.usefixtures("_small_chunks")
sizes = st.integers(1, 200)
thresholds = st.floats(0, 3) | st.sampled_from([np.inf, np.nan, -1.0, 1e-320, 1e39, 1e300])


# ---- select


@small_chunks
@settings(max_examples=300)
@given(vectors(sizes), st.integers(1, 200), thresholds)
def test_what_is_selected_is_what_a_sort_puts_first(
    dense: np.ndarray, k: int, threshold: float
) -> None:
    k = min(k, dense.size)
    read_only(dense)
    picked, _ = select(dense, k, threshold)
    assert_same(picked, top(dense, k))


@small_chunks
@settings(max_examples=100)
@given(vectors(sizes), st.integers(1, 200), thresholds)
def test_the_next_threshold_never_asks_for_more_than_there_is(
    dense: np.ndarray, k: int, threshold: float
) -> None:
    k = min(k, dense.size)
    picked, following = select(dense, k, threshold)
    lowest = np.abs(picked.values).min() if picked.entries == k else 0.0
    assert 0.0 <= following <= lowest
    assert type(following) is float


@small_chunks
@settings(max_examples=100)
@given(vectors(sizes), st.data())
def test_a_guess_at_a_value_that_is_there_includes_it(
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
def test_the_largest_and_the_smallest_numbers_there_are_can_be_told_apart(dtype: type) -> None:
    info = np.finfo(dtype)
    dense = np.array([info.smallest_subnormal, info.tiny, info.max, -info.max], dtype)
    for k in range(1, 5):
        assert_same(select(dense, k)[0], top(dense, k))


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
@by_dtype
def test_chunks_leave_no_seam(size: int, dtype: type, random: np.random.Generator) -> None:
    dense = random.standard_normal(size).astype(dtype)
    dense[[0, -1]] = 9, -9  # at both ends
    if size > CHUNK:
        dense[CHUNK - 1 : CHUNK + 1] = 8, -8  # on both sides of the seam
    for k in (1, 2, 700, size // 3, size):
        expected = top(dense, k)
        for threshold in (0.0, float(np.abs(expected.values).min()), 0.01, 100.0):
            assert_same(select(dense, k, threshold)[0], expected)


@pytest.mark.parametrize(
    "order", [np.sort, lambda a: np.sort(a)[::-1].copy()], ids=["ascending", "descending"]
)
def test_candidates_that_keep_coming_are_pruned_without_loss(
    order: Callable[[np.ndarray], np.ndarray], random: np.random.Generator
) -> None:
    dense = order(random.random(6 * CHUNK).astype(np.float32))
    with watched("_prune") as prune:
        assert_same(select(dense, 3)[0], top(dense, 3))
    assert prune.called


@pytest.mark.parametrize("value", [1.0, np.finfo(np.float32).max])
def test_of_many_equals_the_first_survive_a_pruning(value: float) -> None:
    dense = np.full(3 * CHUNK, value, np.float32)
    dense[5] = 0
    picked, _ = select(dense, 6)
    assert picked.indices.tolist() == [0, 1, 2, 3, 4, 6]


def test_a_sample_that_misleads_costs_a_scan_and_no_entry(random: np.random.Generator) -> None:
    # k = 1000 samples every 15th value; only those are large, so the guess is far too high.
    dense = random.standard_normal(100_000).astype(np.float32)
    dense[::15] *= 1000
    for k in (1000, 10_000):
        assert_same(select(dense, k)[0], top(dense, k))
    # And every value but the sampled ones is large: far too low.
    dense = random.standard_normal(100_000).astype(np.float32) * 1000
    dense[::15] /= 1000
    assert_same(select(dense, 1000)[0], top(dense, 1000))


def test_the_threshold_of_the_last_step_makes_one_scan_enough(random: np.random.Generator) -> None:
    residual = np.zeros(100_000, np.float32)
    threshold = 0.0
    for step in range(20):
        gradient = random.standard_normal(residual.size).astype(np.float32)
        with watched("scan") as scan:
            picked, threshold = accumulate_and_select(residual, gradient, 100, threshold)
        residual[picked.indices] = 0
        assert step == 0 or scan.call_count == 1


@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_outside_the_vector_is_refused(k: int) -> None:
    dense = np.ones(5, np.float32)
    for call in (lambda: select(dense, k), lambda: accumulate_and_select(dense, dense, k)):
        with pytest.raises(ValueError, match=rf"k must lie in 1\.\.5 .*, got {k}"):
            call()
    assert dense.tolist() == [1] * 5


# ---- accumulate and select


@small_chunks
@settings(max_examples=200)
@given(vectors(sizes), st.integers(1, 200), thresholds, st.randoms(use_true_random=False))
def test_accumulating_adds_exactly_once_whatever_the_threshold(
    residual: np.ndarray, k: int, threshold: float, shuffler
) -> None:
    k = min(k, residual.size)
    gradient = np.array(shuffler.sample(residual.tolist(), residual.size), residual.dtype)
    read_only(gradient)
    expected = residual + gradient
    picked, following = accumulate_and_select(residual, gradient, k, threshold)
    assert residual.tobytes() == expected.tobytes()
    assert_same(picked, top(expected, k))
    assert following == select(expected, k, threshold)[1]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK + 1, 2 * CHUNK])
def test_a_gradient_of_another_size_is_refused_untouched(size: int, threshold: float) -> None:
    residual = np.zeros(CHUNK, np.float32)
    with pytest.raises(ValueError, match=rf"float32 \[{CHUNK}\].*float32 \[{size}\]"):
        accumulate_and_select(residual, np.ones(size, np.float32), 1, threshold)
    assert not residual.any()


def test_a_gradient_of_another_dtype_is_refused_untouched() -> None:
    residual = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"float32 \[4\].*float64 \[4\]"):
        accumulate_and_select(residual, np.ones(4), 1)
    assert not residual.any()


# ---- merge


@settings(max_examples=300)
@given(sparse_pairs(), st.integers(1, 50))
def test_a_merge_keeps_the_k_largest_of_the_sum_and_drops_the_rest(
    pair: tuple[SparseVector, SparseVector], k: int
) -> None:
    read_only(*pair)
    a, b = pair
    kept, dropped = merge(a, b, k)
    total = a.to_dense() + b.to_dense()
    assert_same(kept, top(total, k))
    assert_same(dropped, rest(total, k))
    # Nothing is lost: kept + dropped = a + b, to the bit (up to the sign of zeros).
    assert np.array_equal(kept.to_dense() + dropped.to_dense(), total)


@settings(max_examples=200)
@given(sparse_pairs(), st.integers(1, 50))
def test_both_partners_merge_to_the_same_bits(
    pair: tuple[SparseVector, SparseVector], k: int
) -> None:
    a, b = pair
    for one, other in zip(merge(a, b, k), merge(b, a, k), strict=True):
        assert_same(one, other)


def test_merging_is_not_associative() -> None:
    # Why every rank must merge in the same tree.
    a, b, c = (
        SparseVector(np.array([index], np.int32), np.array([value], np.float32), 9)
        for index, value in ((5, 1.0), (7, 2.0), (5, 1.5))
    )
    assert merge(merge(a, b, 1)[0], c, 1)[0].indices.tolist() == [7]
    assert merge(a, merge(b, c, 1)[0], 1)[0].indices.tolist() == [7]
    assert merge(merge(a, c, 1)[0], b, 1)[0].indices.tolist() == [5]


# ---- the small ones


@settings(max_examples=150)
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.sampled_from("il"))
def test_containment_is_that_of_sets(held: set[int], wanted: set[int], code: str) -> None:
    a, b = (np.array(sorted(part), code) for part in (held, wanted))
    read_only(a, b)
    found = contains(a, b)
    assert found.dtype == np.bool_
    assert found.tolist() == [index in held for index in sorted(wanted)]


@settings(max_examples=100)
@given(sparse_pairs())
def test_adding_entries_is_adding_the_dense_form(pair: tuple[SparseVector, SparseVector]) -> None:
    dense, addend = pair[0].to_dense(), pair[1]
    read_only(addend)
    expected = dense + addend.to_dense()
    add_at(dense, addend)
    assert np.array_equal(dense, expected)


@small_chunks
@settings(max_examples=100)
@given(st.integers(0, 70), st.data(), dtypes, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_one_bad_number_anywhere_is_found(
    size: int, data: st.DataObject, dtype: type, bad: float
) -> None:
    array = np.full(size, np.finfo(dtype).max, dtype)
    read_only(array)
    assert all_finite(array)
    if size:
        at = data.draw(st.integers(0, size - 1))
        assert not all_finite(np.where(np.arange(size) == at, dtype(bad), array))


@pytest.mark.parametrize("at", [0, CHUNK - 1, CHUNK, 2 * CHUNK])
def test_one_bad_number_on_either_side_of_a_seam_is_found(at: int) -> None:
    array = np.zeros(2 * CHUNK + 1, np.float32)
    array[at] = np.nan
    assert not all_finite(array)


def in_turn(dense: list[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays, one addition after the other."""
    total = np.zeros_like(dense[0])
    for array in dense:
        total += array
    return total


@settings(max_examples=150)
@given(st.data(), dtypes, st.integers(1, 20), st.integers(1, 20))
def test_each_index_is_summed_in_the_order_of_the_list(
    data: st.DataObject, dtype: type, length: int, count: int
) -> None:
    values = st.sampled_from(FEW) | st.floats(-(2.0**100), 2.0**100, width=32)
    dense = [data.draw(arrays(dtype, length, elements=values)) for _ in range(count)]
    lists = [SparseVector.from_dense(array) for array in dense]
    read_only(*lists)
    assert_same(sum_by_index(lists), SparseVector.from_dense(in_turn(dense)))


def test_a_long_sum_is_not_rearranged() -> None:
    # From eight addends on NumPy's reductions add pairwise; here 1 vanishes in 1e8 each time.
    dense = [np.array([value], np.float32) for value in [1e8] + [1.0] * 20]
    assert in_turn(dense).tolist() == [1e8]
    assert sum_by_index([SparseVector.from_dense(array) for array in dense]).values == [1e8]


def test_the_kernels_in_use_have_a_name() -> None:
    assert in_use().startswith("NumPy reference" if why_not_compiled() else "C++ core")


# ---- bugs of others, retold


def test_an_index_of_both_lists_comes_out_once_even_when_k_exceeds_the_nonzeros() -> None:
    # An implementation summed into one list and left a zero under the same index in the other;
    # the zero twin was selected, and the last writer of that index won.
    a = SparseVector(np.array([1, 4], np.int32), np.array([1, 2], np.float32), 9)
    b = SparseVector(np.array([4, 6], np.int32), np.array([-2, 3], np.float32), 9)
    kept, dropped = merge(a, b, 9)
    assert kept.indices.tolist() == [1, 6]
    assert dropped.entries == 0


def test_too_many_candidates_are_cut_by_magnitude_not_by_position() -> None:
    # An implementation kept the first k of those over its threshold.
    dense = np.arange(1, 101, dtype=np.float32)
    picked, _ = select(dense, 10, threshold=50.0)
    assert picked.indices.tolist() == list(range(90, 100))


def test_negative_values_keep_their_sign() -> None:
    picked, _ = select(np.array([-3, 1, -2], np.float32), 2)
    assert picked.values.tolist() == [-3, -2]


def test_the_global_random_state_is_left_alone() -> None:
    before = np.random.get_state()[1].tobytes()
    select(np.ones(10 * CHUNK, np.float32), 1000)
    assert np.random.get_state()[1].tobytes() == before
