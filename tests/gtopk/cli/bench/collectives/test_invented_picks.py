"""Picks are seeded, valid, and as many as requested."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.vector import check
from gtopk.cli.bench.collectives import cases as invented_picks
from gtopk.cli.bench.collectives.cases import DISTRIBUTIONS, picks

SIZES = [(1, 1), (7, 7), (63, 10), (64, 64), (10_000, 100), (100_000, 3_000)]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("length", "k"), SIZES)
def test_picks_are_a_vector_of_at_most_k_entries(distribution: str, length: int, k: int) -> None:
    vector = check(picks(distribution, length, k, rank=2, seed=5))
    assert vector.length == length
    assert 1 <= vector.entries <= k
    assert np.abs(vector.values).min() >= 1.0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_picks_of_a_long_vector_have_the_requested_number(distribution: str) -> None:
    """Shuffling all positions would take 8 TB."""
    vector = check(picks(distribution, 10**12, 100_000, rank=2, seed=5))
    assert vector.entries == 100_000 or distribution == "clustered"
    assert vector.indices.max() > 9 * 10**11


def test_picks_of_a_long_vector_are_drawn_without_shuffling_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invented_picks, "_LONG", 1000)
    vector = check(picks("uniform", 4000, 1000, rank=2, seed=5))
    assert vector.entries == 1000
    assert 1900 < vector.indices.mean() < 2100


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_picks_depend_only_on_rank_and_seed(distribution: str) -> None:
    picked, again, other = (picks(distribution, 9_000, 90, rank, seed=1) for rank in (3, 3, 4))
    assert picked.indices.tobytes() == again.indices.tobytes()
    assert picked.values.tobytes() == again.values.tobytes()
    assert picked.indices.tobytes() != other.indices.tobytes()


def test_clustered_picks_overlap_and_are_adjacent() -> None:
    def shared_and_neighbouring(distribution: str) -> tuple[int, int]:
        a, b = (picks(distribution, 1_000_000, 10_000, rank, seed=1) for rank in (0, 1))
        shared = np.intersect1d(a.indices, b.indices).size
        return shared, int(np.count_nonzero(np.diff(a.indices) == 1))

    uniform, clustered = map(shared_and_neighbouring, ("uniform", "clustered"))
    assert clustered[0] > 5 * uniform[0]
    assert clustered[1] > 5 * uniform[1]
