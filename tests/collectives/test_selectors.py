"""Approximate selectors: they return real entries, and about as many as requested."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collectives import SELECTORS, select
from collectives.selectors import fixed_threshold
from collectives.vector import check

by_name = pytest.mark.parametrize("name", list(SELECTORS))


@by_name
@given(arrays(np.float32, st.integers(1, 200), elements=st.floats(-9, 9, width=32)), st.data())
def test_selectors_return_only_nonzero_entries_of_the_vector(
    name: str, dense: np.ndarray, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, dense.size))
    dense.setflags(write=False)
    found = check(SELECTORS[name](dense, k))
    assert found.values.tobytes() == dense[found.indices].tobytes()
    assert found.values.all()


@by_name
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_selectors_return_about_k_entries_of_normal_values(
    name: str, dtype: type, random: np.random.Generator
) -> None:
    dense = random.standard_normal(200_000).astype(dtype)
    found = SELECTORS[name](dense, 2000)
    assert 0.5 * 2000 <= found.entries <= 1.5 * 2000
    # The larger of those are all among them.
    sure, _ = select(dense, 500)
    assert np.isin(sure.indices, found.indices).all()


@by_name
def test_selectors_refuse_invalid_k_dtype_or_shape(name: str) -> None:
    dense = np.ones(5, np.float32)
    for k in (0, 6):
        with pytest.raises(ValueError, match=rf"k must lie in 1\.\.5 .*, got {k}"):
            SELECTORS[name](dense, k)
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.0 "):
        SELECTORS[name](dense[:0], 1)
    with pytest.raises(ValueError, match="float32 or float64, got float16"):
        SELECTORS[name](dense.astype(np.float16), 1)
    with pytest.raises(ValueError, match="one-dimensional"):
        SELECTORS[name](np.ones((2, 3)), 1)


@by_name
@pytest.mark.parametrize("bad", [0.001, 1.0])
def test_selectors_do_not_return_nan(name: str, bad: float, random: np.random.Generator) -> None:
    dense = random.standard_normal(10_000)
    dense[random.random(dense.size) < bad] = np.nan
    assert not np.isnan(SELECTORS[name](dense, 100).values).any()


def test_fitted_thresholds_miss_k_on_residuals_with_a_cliff() -> None:
    # Error feedback leaves many entries just under the threshold, where no fitted tail sees them.
    dense = np.full(100_000, 1e-3, np.float32)
    dense[:2000] = 0.95
    dense[:100] = 1.0
    assert SELECTORS["gaussian-k"](dense, 100).entries == 2000
    assert SELECTORS["sidco"](dense, 100).entries == 0
    assert select(dense, 100)[0].indices.tolist() == list(range(100))


def test_fixed_threshold_includes_equal_values_and_excludes_zeros() -> None:
    dense = np.array([0, 1, -2, 3, -0.5], np.float32)
    assert fixed_threshold(dense, 1.0).indices.tolist() == [1, 2, 3]
    assert fixed_threshold(dense, 0.0).indices.tolist() == [1, 2, 3, 4]
