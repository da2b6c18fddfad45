"""Regions have about the same number of picks for any positions, and all ranks agree on them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import SparseVector, local_world, run_ranks
from collectives.algorithms import regions
from collectives.algorithms.regions import Cut, Regions, estimate
from tests.collectives.algorithms.worlds import WHERE, picks_where


def at(indices: list[int], length: int) -> SparseVector:
    return SparseVector(np.array(indices, np.int32), np.ones(len(indices), np.float32), length)


def agreed(picks: list[SparseVector]) -> Cut:
    cuts = run_ranks(local_world(len(picks), 30), lambda t: estimate(picks[t.rank], t))
    assert all(cut == cuts[0] for cut in cuts)
    return cuts[0]


def loads(picks: list[SparseVector], cut: Cut) -> list[int]:
    inner = cut.bounds[1:-1]
    return [
        sum(int((np.searchsorted(inner, pick.indices, "right") == region).sum()) for pick in picks)
        for region in range(len(picks))
    ]


@settings(max_examples=100)
@given(st.integers(1, 50), st.lists(st.sets(st.integers(0, 49)), min_size=1, max_size=9))
def test_regions_cover_the_vector_once_and_every_rank_owns_one(
    length: int, picked: list[set[int]]
) -> None:
    picks = [at(sorted(index for index in one if index < length), length) for one in picked]
    bounds, owners = agreed(picks)
    assert (bounds[0], bounds[-1]) == (0, length)
    assert bounds == sorted(bounds)
    assert sorted(owners) == list(range(len(picks)))
    assert len(bounds) == len(picks) + 1


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", [2, 3, 8, 17])
def test_region_gets_at_most_one_and_a_half_times_the_mean(
    where: str, size: int, random: np.random.Generator
) -> None:
    # Each end of a region is off by less than one of each rank's 4 P quantiles, a quarter of it.
    k = 64 * size
    picks = picks_where(where, random, size, 200_000, k)
    assert max(loads(picks, agreed(picks))) <= 1.5 * k


@pytest.mark.parametrize("size", [2, 3, 4, 8, 17])
def test_regions_are_even_when_picks_are_spread_evenly(
    size: int, random: np.random.Generator
) -> None:
    k = 256 * size
    picks = [
        at(sorted(random.choice(200_000, k, replace=False).tolist()), 200_000) for _ in range(size)
    ]
    divided = loads(picks, agreed(picks))
    # Without interpolation, the first region would get half a quantile more from each other rank.
    assert max(divided) <= 1.04 * k
    assert min(divided) >= 0.96 * k


def test_quantiles_of_one_pick_give_equal_regions() -> None:
    picks = [at(list(range(rank, 240, 10)), 240) for rank in range(8)]
    assert loads(picks, agreed(picks)) == [24] * 8


@pytest.mark.parametrize("where", ["own stretch", "next rank's stretch"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_regions_are_owned_by_the_ranks_with_most_picks_in_them(
    where: str, size: int, random: np.random.Generator
) -> None:
    k = 64 * size
    picks = picks_where(where, random, size, 200_000, k)
    cut = agreed(picks)
    for rank, pick in enumerate(picks):
        region = cut.owners.index(rank)
        kept = pick.index_range(cut.bounds[region], cut.bounds[region + 1]).entries
        assert kept >= 0.7 * k


def test_boundaries_are_kept_for_the_given_steps_without_messages(monkeypatch) -> None:
    monkeypatch.setattr(regions, "EVERY", 3)
    picks = [at([1, 4, 7], 9), at([2, 5, 8], 9)]
    world = local_world(2, 30)
    kept = [Regions() for _ in world]
    messages = []
    for _ in range(7):
        run_ranks(world, lambda t: kept[t.rank].agree(picks[t.rank], t))
        messages.append([t.traffic.read_and_reset().sent_messages for t in world])
    assert messages == [[1, 1], [0, 0], [0, 0]] * 2 + [[1, 1]]


def test_overfull_region_causes_new_boundaries() -> None:
    (transport,) = local_world(1)
    kept = Regions()
    picks = at([1], 4)

    def has_new_boundaries(loads: list[int]) -> bool:
        before = kept.agree(picks, transport)
        kept.note_loads(loads)
        return kept.agree(picks, transport) is not before

    assert not has_new_boundaries([30, 10])  # new boundaries are no more even than this
    assert not has_new_boundaries([30, 10])
    assert not has_new_boundaries([0, 0])
    kept._fullest = 1.0
    assert not has_new_boundaries([14, 6])
    assert has_new_boundaries([16, 4])


def test_changed_length_or_number_of_ranks_causes_new_boundaries() -> None:
    kept = Regions()
    (alone,) = local_world(1)
    assert kept.agree(at([1], 4), alone).bounds == [0, 4]
    assert kept.agree(at([1], 5), alone).bounds == [0, 5]
    world = local_world(2, 30)
    others = [kept, Regions()]
    cuts = run_ranks(world, lambda t: others[t.rank].agree(at([1, 3], 5), t))
    assert cuts[0] == cuts[1]
    assert len(cuts[0].owners) == 2


def test_quantiles_per_rank_are_as_documented() -> None:
    assert regions.QUANTILES_PER_RANK == 4
    assert "4 P equal quantiles" in regions.__doc__
