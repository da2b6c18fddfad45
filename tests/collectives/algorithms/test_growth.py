"""Lists grow towards growth * k in the last rounds, and stay k before."""

from __future__ import annotations

import math
from typing import Any

import pytest

from collectives.algorithms.gtopk import check_growth, kept_sizes


def test_list_sizes_are_as_drawn() -> None:
    line = next(
        line for line in (kept_sizes.__doc__ or "").splitlines() if "growth = 4, 5 rounds" in line
    )
    drawn = [1 if size == "k" else int(size[:-1]) for size in line.split("rounds")[1].split()[:5]]
    assert kept_sizes(100, 4.0, 5, 10**6) == [100 * size for size in drawn]


@pytest.mark.parametrize("rounds", range(7))
@pytest.mark.parametrize("k", [1, 3, 100])
def test_every_round_keeps_k_without_growth(k: int, rounds: int) -> None:
    assert kept_sizes(k, 1.0, rounds, 10**6) == [k] * rounds


@pytest.mark.parametrize("rounds", range(1, 7))
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0, 100.0])
@pytest.mark.parametrize("k", [1, 3, 100])
def test_list_sizes_never_fall_and_end_at_growth_times_k(
    k: int, factor: float, rounds: int
) -> None:
    sizes = kept_sizes(k, factor, rounds, 10**6)
    assert sizes == sorted(sizes)
    assert sizes[0] >= k
    assert sizes[-1] == round(factor * k)
    # Each round but the first sends the list that the previous one kept.
    assert k + sum(sizes[:-1]) < (rounds + factor) * k + rounds


def test_list_sizes_are_at_most_the_vectors_length() -> None:
    assert kept_sizes(5, 4.0, 3, 8) == [5, 8, 8]
    assert kept_sizes(5, 1e308, 3, 8) == [8, 8, 8]


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, math.inf, math.nan, 10**400, "2", [2], None])
def test_growth_below_1_or_not_finite_is_refused(factor: Any) -> None:
    with pytest.raises(ValueError, match="growth must be a number from 1 on, got"):
        check_growth(factor)
