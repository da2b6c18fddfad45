"""Laws for every algorithm with every option: nothing is lost, and all ranks agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import ALGORITHMS, SparseVector
from collectives.vector import check
from collectives.wire import EXACT, Format
from tests.collectives.algorithms.worlds import (
    FORMATS,
    VARIANTS,
    assert_nothing_is_lost,
    bits,
    integer_picks,
    random_picks,
    rendezvous_world,
    run,
    worlds,
)
from tests.matrix import some_of

every_variant = pytest.mark.parametrize("variant", VARIANTS)
formats = st.sampled_from(FORMATS)
ROUNDING = Format("packed", "int8")


@every_variant
@settings(max_examples=12)
@given(worlds(np.float64), formats)
def test_nothing_is_lost(
    variant: str, world: tuple[int, list[SparseVector]], format: Format
) -> None:
    k, picks = world
    assert_nothing_is_lost(picks, run(variant, picks, k, format), additions=4 * len(picks))


@every_variant
@settings(max_examples=10)
@given(worlds(np.float32), formats)
def test_ranks_agree_to_the_bit(
    variant: str, world: tuple[int, list[SparseVector]], format: Format
) -> None:
    k, picks = world
    outcomes = run(variant, picks, k, format)
    assert len({bits(update) for update, _ in outcomes}) == 1
    for update, returned in outcomes:
        check(update)
        check(returned)
        assert update.length == returned.length == picks[0].length
        assert update.values.dtype == returned.values.dtype == np.float32
    assert_nothing_is_lost(picks, outcomes, additions=4 * len(picks))


@every_variant
@pytest.mark.parametrize("size", [1, 2, 3, 6, 9, 16, 17])
def test_integer_sums_are_conserved_to_the_bit(
    variant: str, size: int, random: np.random.Generator
) -> None:
    picks = integer_picks(random, size, 300, 20)
    outcomes = run(variant, picks, 20)
    before = np.sum([pick.to_dense() for pick in picks], axis=0)
    after = outcomes[0][0].to_dense() + sum(returned.to_dense() for _, returned in outcomes)
    assert after.tolist() == before.tolist()
    assert outcomes[0][0].entries > 0


@pytest.mark.parametrize(
    ("variant", "format"),
    some_of(
        itertools.product(VARIANTS, [EXACT, ROUNDING, Format("raw", "int2")]),
        *((name, ROUNDING) for name in ALGORITHMS),
        ("gtopk", Format("raw", "int2")),
    ),
)
def test_laws_hold_for_64_ranks(variant: str, format: Format, random: np.random.Generator) -> None:
    """Only each algorithm's default options, with rounding; up to 17 ranks cover the others."""
    size = 64
    picks = random_picks(random, size, 2000, 40, np.float64)
    outcomes = run(variant, picks, 40, format)
    assert_nothing_is_lost(picks, outcomes, additions=4 * size)
    assert len({bits(update) for update, _ in outcomes}) == 1
    assert outcomes[0][0].entries > 0


@every_variant
@settings(max_examples=5)
@given(worlds(np.float64), formats)
def test_repeated_call_gives_the_same_bits(
    variant: str, world: tuple[int, list[SparseVector]], format: Format
) -> None:
    k, picks = world
    for one, other in zip(
        run(variant, picks, k, format), run(variant, picks, k, format), strict=True
    ):
        assert [bits(vector) for vector in one] == [bits(vector) for vector in other]


@every_variant
@pytest.mark.parametrize("size", [2, 3, 4, 7, 9])
def test_reduction_with_rendezvous_sends_does_not_deadlock(
    variant: str, size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 300, 20)
    for one, other in zip(
        run(variant, picks, 20), run(variant, picks, 20, make_world=rendezvous_world), strict=True
    ):
        assert [bits(vector) for vector in one] == [bits(vector) for vector in other]


@every_variant
@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_share_no_memory_with_the_picks(
    variant: str, size: int, random: np.random.Generator
) -> None:
    picks = random_picks(random, size, 60, 10)
    for pick, outcome in zip(picks, run(variant, picks, 10), strict=True):
        for vector in outcome:
            assert not np.shares_memory(vector.values, pick.values)
            assert not np.shares_memory(vector.indices, pick.indices)
