"""Quantiles are equal parts of a list, none empty."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives.algorithms.regions import at_positions, quantile_ends


@given(st.integers(0, 200), st.integers(1, 70))
def test_quantiles_are_equal_and_not_empty(entries: int, quantiles: int) -> None:
    ends = quantile_ends(entries, quantiles)
    sizes = np.diff([0, *ends])
    assert len(ends) == min(entries, quantiles)
    assert sizes.sum() == entries
    assert not sizes.size or (sizes.min() >= 1 and sizes.max() - sizes.min() <= 1)


def test_at_positions_keeps_dtype_and_bits() -> None:
    array = np.array([1.1, 2.2, 3.3], np.float32)
    assert at_positions(array, [2, 0]).tobytes() == array[[2, 0]].tobytes()
    assert at_positions(array, []).dtype == np.float32
